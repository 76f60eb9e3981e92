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


NESTED: dict[str, Any] = {"val_share": 0.75, "val_steps": 5}
"""What our form changes in NestedMAML, beside its anchored rule (`weighting.rule`): see docs/how-it-works.md."""

PRESETS: dict[str, Preset] = {
    "maml-ood-rm": Preset("MAML", {"remove": "tasks"}),
    "maml-ood-rm-refill": Preset("MAML", {"remove": "tasks", "refill": True}),
    "maml": Preset("MAML"),
    "maml-val": Preset("MAML", trains_on="val"),
    "maml-both": Preset("MAML", trains_on="both"),
    "l2r": Preset("L2R"),
    "mmaml": Preset("MMAML"),
    "btaml": Preset("BTAML"),
    # its validation gradient is no meta-gradient: it can move weights, but takes no part in the meta-step
    "nested-fo": Preset("NestedMAML", {**NESTED, "order": "first", "val_share": 0.0}, weighting="cluster"),
    "nested": Preset("NestedMAML", NESTED, weighting="cluster"),
    "nested-weighted": Preset("NestedMAML", {**NESTED, "val_share": 0.5, "sampling": "weighted"}, weighting="cluster"),
    "nested-paper": Preset("NestedMAML", {"val_steps": 1, "weight_lr": 0.1}, weighting="cluster"),
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
