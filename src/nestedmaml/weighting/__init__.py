"""Weighting rules: who shares a weight with whom, and how weights follow the hypergradient.

Each rule is an (init, update) pair in a file of its own; `rule` holds what they share, `paper` the paper's own form.
"""

from typing import Any, TypeVar

from nestedmaml.weighting.amortised import Amortised
from nestedmaml.weighting.cluster import Cluster
from nestedmaml.weighting.features import Knowledge
from nestedmaml.weighting.instance import Instance
from nestedmaml.weighting.rule import Rule, State
from nestedmaml.weighting.task import Task
from nestedmaml.weighting.uniform import Uniform

__all__ = ["Amortised", "Cluster", "Instance", "Knowledge", "Rule", "State", "Task", "Uniform", "paper"]

R = TypeVar("R", bound=Rule)


def paper(kind: type[R] = Cluster, *args: Any, **options: Any) -> R:  # type: ignore[assignment]
    """A rule in the paper's own form: the weight itself, clamped at zero, moved by the raw inner product.

    200 clusters where no other kind is named; weights start at 1 for tasks and at .005 for instances.
    """
    level = options.get("level", "instance" if kind.__name__ == "Instance" else "task")
    own = {
        "form": "linear",
        "normalize": "none",
        "anchored": False,
        "cosine": 0.0,
        "optimizer": "sgd",
        "lr": None,
        "bound": float(2**40),
        "initial": 1.0 if level == "task" else 0.005,
    }
    return kind(*args, **{**own, **options})
