"""What every pool of counted tasks shares: which ids there are, how batches are drawn, which are corrupt."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.tasks.counter import Shuffle, integers

Level = Literal["task", "instance"]


class Pool:
    """``size`` tasks, of which exactly ``round(ratio * size)`` are corrupt. A subclass says what ``draw`` gives.

    ``sample(step, count)`` draws ids uniformly, with replacement, as a pure function of seed and step.
    ``size=None`` is a pool without end, whose batches never repeat: fresh test tasks.
    """

    stream: str
    seed: int

    def __init__(self, size: int | None, ratio: float, seed: int, stream: str) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a pool needs at least one task, got size={size}")
        if not 0 <= float(ratio) <= 1:
            raise ValueError(f"the ratio of corrupt tasks must be in [0, 1], got {ratio}")
        if size is None and ratio > 0:
            raise ValueError(f"a pool without end holds clean tasks only, got ratio={ratio}")
        self.size, self.ratio, self.seed, self.stream = size, float(ratio), seed, stream
        self._shuffle = None if size is None else Shuffle(size, seed, f"{stream}/corrupt")

    @property
    def ids(self) -> Tensor:
        """All task ids."""
        if self.size is None:
            raise ValueError("a pool without end has no list of ids")
        return torch.arange(self.size)

    def sample_ids(self, step: int, count: int) -> Tensor:
        """The ids of batch ``step``."""
        if count < 1:
            raise ValueError(f"a batch needs at least one task, got {count}")
        if self.size is None:
            return torch.arange(step * count, (step + 1) * count)
        return torch.from_numpy(integers(self.seed, f"{self.stream}/batch", step, np.arange(count), high=self.size))

    def sample(self, step: int, count: int) -> TaskBatch:
        """Batch ``step``, of ``count`` tasks."""
        return self.draw(self.sample_ids(step, count))

    def draw(self, ids: Tensor) -> TaskBatch:
        """The tasks with these ids."""
        raise NotImplementedError

    def corrupt(self, ids: Tensor, level: Level = "task") -> Tensor:
        """The truth, for skylines and for scoring alone: which of these tasks are corrupt."""
        if level != "task":
            raise ValueError(f"{type(self).__name__} corrupts whole tasks; it knows no truth at level {level!r}")
        if self._shuffle is None or self.size is None or self.ratio == 0:
            return torch.zeros(ids.shape, dtype=torch.bool)
        return torch.from_numpy(self._shuffle(ids.numpy()) < round(self.ratio * self.size))


class Both(Pool):
    """Two pools as one, drawn from in proportion to their sizes; ids of the second follow those of the first."""

    def __init__(self, first: Pool, second: Pool) -> None:
        if first.size is None or second.size is None:
            raise ValueError("pools without end cannot be joined")
        self.first, self.second = first, second
        super().__init__(first.size + second.size, 0.0, first.seed, f"{first.stream}+{second.stream}")

    def corrupt(self, ids: Tensor, level: Level = "task") -> Tensor:
        """What the two pools say, for skylines and for scoring alone."""
        size = self.first.size
        assert size is not None
        out = torch.zeros(ids.shape, dtype=torch.bool)
        for mask, pool, shift in ((ids < size, self.first, 0), (ids >= size, self.second, size)):
            if bool(mask.any()):
                out[mask] = pool.corrupt(ids[mask] - shift, level)
        return out

    def draw(self, ids: Tensor) -> TaskBatch:
        """The tasks with these ids."""
        size, device = self.first.size, ids.device
        assert size is not None
        parts, order = [], []
        for mask, pool, shift in ((ids < size, self.first, 0), (ids >= size, self.second, size)):
            if bool(mask.any()):
                parts.append(pool.draw(ids[mask] - shift))
                order.append(mask.nonzero().flatten())
        back = torch.cat(order).argsort().to(device)
        names = ("support_x", "support_y", "query_x", "query_y")
        joined = {n: torch.cat([getattr(p, n) for p in parts])[back] for n in names}
        return TaskBatch(**joined, task_ids=ids)
