"""The methods by name: which learner, with which options, on which of the pools.

What is tuned is tuned here; docs/results says how, and what it gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True)
class Preset:
    """A method of the comparison.

    ``learner`` names a class of nestedmaml; ``trains_on`` says which pool its training tasks come from: the training
    pool, the clean validation tasks ("val"), or both, in proportion to their sizes.
    """

    learner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trains_on: str = "train"
    weighting: str = ""

    @property
    def nested(self) -> bool:
        """Whether it learns weights by the nested update."""
        return self.learner == "NestedMAML"


# Step sizes: the best of the paper's grid for alpha and eta, for each method, docs/results/sinusoid-tuning.csv.
FINE: dict[str, Any] = {"inner_lr": 0.001, "meta_lr": 0.01}
COARSE: dict[str, Any] = {"inner_lr": 0.01, "meta_lr": 0.01}

NESTED: dict[str, Any] = {**COARSE, "val_share": 0.75, "val_steps": 5, "clip": 1.0}
"""What our form changes in NestedMAML, beside its anchored rule (`weighting.rule`): see docs/how-it-works.md."""

PRESETS: dict[str, Preset] = {
    "maml-ood-rm": Preset("MAML", {**FINE, "remove": "tasks"}),
    "maml-ood-rm-refill": Preset("MAML", {**COARSE, "remove": "tasks", "refill": True}),
    "maml": Preset("MAML", FINE),
    "maml-val": Preset("MAML", COARSE, trains_on="val"),
    "maml-both": Preset("MAML", FINE, trains_on="both"),
    "l2r": Preset("L2R", COARSE),
    "mmaml": Preset("MMAML"),
    "btaml": Preset("BTAML"),
    "nested-fo": Preset("NestedMAML", {**NESTED, "order": "first", "val_steps": 1}, weighting="cluster"),
    "nested": Preset("NestedMAML", NESTED, weighting="cluster"),
    "nested-weighted": Preset("NestedMAML", {**NESTED, "val_share": 0.5, "sampling": "weighted"}, weighting="cluster"),
    "nested-paper": Preset("NestedMAML", {**FINE, "val_steps": 1, "weight_lr": 0.1}, weighting="cluster"),
}


def preset(name: str) -> Preset:
    """A method by name."""
    if name not in PRESETS:
        raise ValueError(f"there is no method {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def rule(name: str, clusters: int, *, paper: bool) -> Any:
    """A weighting rule by name, in our form or in the paper's own."""
    from nestedmaml import weighting

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "task": (weighting.Task, {}),
        "cluster": (weighting.Cluster, {"k": clusters}),
        "amortised": (weighting.Amortised, {}),
    }
    kind, options = kinds[name]
    return weighting.paper(kind, **options) if paper else kind(**options)
