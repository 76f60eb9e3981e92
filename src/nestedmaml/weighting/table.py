"""Rules that keep one number for each place: a task, an instance, a cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting.features import Knowledge
from nestedmaml.weighting.rule import _MOMENTS, Rule, State


class Table(Rule):
    """A number for each place; only the rows that a batch looks up are read and written."""

    def raw(self, learned: dict[str, Tensor], state: State, where: Tensor) -> Tensor:
        """The rows at ``where``."""
        return learned["table"][where]

    def _descend(self, state: State, where: Tensor, h: Tensor, lr: float) -> State:
        if self._through_pool:
            return super()._descend(state, where, h, lr)
        rows, inverse = where.unique(return_inverse=True)
        part = {"table": state["learned"]["table"][rows].requires_grad_()}
        (g,) = torch.autograd.grad(self._aim(part, state, inverse, h), list(part.values()))
        own = {name: state["moments"][f"table.{name}"][rows] for name in _MOMENTS[self.optimizer]}
        step, own = self._step(g, own)
        before = part["table"].detach()
        after = self.project(before - lr * step, state)
        self.written(state, before, after)
        state["learned"]["table"][rows] = after
        for name, value in own.items():
            state["moments"][f"table.{name}"][rows] = value
        return state

    @property
    def _through_pool(self) -> bool:
        """Whether an update moves all rows, through the pool's mean weight."""
        return False

    def written(self, state: State, before: Tensor, after: Tensor) -> None:
        """Called as rows change."""


class ById(Table):
    """A number for each id. Where the pool's size is not known, the table grows as ids appear.

    The pool's mean weight is kept by difference as rows change, and counts as a constant: one of many rows hardly
    moves it.
    """

    def create(self, knowledge: Knowledge, first: float, device: torch.device) -> State:
        """One row for each id of the pool."""
        table = torch.full((knowledge.size or 0,), first, dtype=torch.float64, device=device)
        fixed = {"first": torch.tensor(first, dtype=torch.float64)}
        state: State = {"learned": {"table": table}, "fixed": fixed}
        fixed["excess"] = torch.zeros((), dtype=torch.float64)
        return state

    def locate(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """The ids of the batch."""
        ids = knowledge.ids(batch)
        if ids is None:
            what = "task_ids" if self.level == "task" else "instance_ids"
            raise ValueError(f"{type(self).__name__} keeps a weight by id, but the batch has no {what}")
        return self.locate_ids(state, knowledge, ids)

    def locate_ids(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The ids, and room for them."""
        table = state["learned"]["table"]
        missing = int(ids.max()) + 1 - len(table)
        if missing > 0:
            grown = state["fixed"]["first"].to(table).expand(missing)
            state["learned"]["table"] = torch.cat([table, grown])
            for name, value in state["moments"].items():
                state["moments"][name] = torch.cat([value, value.new_zeros(missing)])
        return ids.to(table.device)

    def knows(self, knowledge: Knowledge) -> bool:
        """Ids are all it takes."""
        return knowledge.size is not None

    def pool(self, learned: dict[str, Tensor], state: State) -> tuple[Tensor, Tensor]:
        """One raw value whose weight is the pool's mean."""
        first = self._positive(state["fixed"]["first"], state)
        mean = (first + state["fixed"]["excess"] / max(1, len(state["learned"]["table"]))).clamp_min(1e-300)
        raw = mean.log() if self.form == "exp" else mean
        return raw.to(learned["table"]).reshape(1), torch.ones_like(learned["table"][:1])

    def written(self, state: State, before: Tensor, after: Tensor) -> None:
        """Keep the sum of all weights."""
        change = (self._positive(after, state) - self._positive(before, state)).sum().cpu()
        state["fixed"]["excess"] = state["fixed"]["excess"] + change
