"""What a learner gives back: a score, weights, a model adapted to one task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nestedmaml.adaptation import Params

__all__ = ["Adapted", "Result", "Weights"]


@dataclass(frozen=True)
class Result:
    """A score over test tasks: ``mean`` (percent correct, or mean squared error), its 95 % interval, ``values [n]``."""

    mean: float
    ci95: float
    n: int
    values: Tensor
    metric: str

    def __str__(self) -> str:
        return f"{self.metric} {self.mean:.4g} ± {self.ci95:.2g} ({self.n} tasks)"


class Weights:
    """Learned weights: those of the pool (``ids``, ``values``), or of any ids, computed when asked for."""

    def __init__(self, level: str, ids: Callable[[], Tensor], at: Callable[[Tensor], Tensor]) -> None:
        self.level, self._ids, self._at = level, ids, at

    @property
    def ids(self) -> Tensor:
        """The ids of the pool."""
        return self._ids()

    @property
    def values(self) -> Tensor:
        """The weights of the pool."""
        return self._at(self.ids)

    def at(self, ids: Tensor) -> Tensor:
        """The weights of these ids alone."""
        return self._at(torch.as_tensor(ids))


class Adapted:
    """A model adapted to one task."""

    def __init__(self, predict: Callable[[Tensor], Tensor], classes: bool, params: Params) -> None:
        self._predict, self._classes, self.params = predict, classes, params

    @torch.no_grad()
    def predict(self, query_x: Tensor) -> Tensor:
        """The most likely class of each instance, or its values in regression."""
        out = self._predict(query_x)
        return out.argmax(-1) if self._classes else out

    @torch.no_grad()
    def predict_proba(self, query_x: Tensor) -> Tensor:
        """The probability of each class, ``[n, ways]``."""
        if not self._classes:
            raise ValueError("predict_proba is for classification; in regression use predict")
        return self._predict(query_x).softmax(-1)
