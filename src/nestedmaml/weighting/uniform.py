"""All weights equal: MAML."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting.features import Knowledge
from nestedmaml.weighting.rule import Rule, State

__all__ = ["Uniform"]


@dataclass(frozen=True, kw_only=True)
class Uniform(Rule):
    """Weights that are never learned."""

    def init(self, knowledge: Knowledge, *, queries: int, device: torch.device | str = "cpu") -> State:
        """One number, the weight."""
        unit = 1.0 if self.level == "task" else 1.0 / queries
        weight = torch.tensor(unit if self.initial is None else self.initial, dtype=torch.float64, device=device)
        return {"learned": {}, "moments": {}, "running": {}, "fixed": {"unit": weight}}

    def weights(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """The same weight for all."""
        return state["fixed"]["unit"].expand(batch.query_x.shape[: 1 if self.level == "task" else 2])

    def at(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The same weight for all."""
        return state["fixed"]["unit"].expand(ids.shape)

    def knows(self, knowledge: Knowledge) -> bool:
        """One weight is everybody's."""
        return knowledge.size is not None

    def update(self, state: State, *args: object, **kwargs: object) -> State:
        """Nothing to learn."""
        return state
