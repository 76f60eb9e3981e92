"""What a weighting rule may know of a task or an instance: its data, never whether it is corrupt.

A source with an ability ``features(ids, level=)`` is asked; for any other, features are computed from the batch:
random Fourier features of (x, y), averaged over the task, an embedding of the distribution a task draws from.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch

Level = Literal["task", "instance"]


class Source(Protocol):
    """The least that a source of tasks can do; its optional abilities are asked for by name."""

    def sample(self, step: int, count: int) -> TaskBatch:
        """Batch ``step``."""
        ...


class Knowledge:
    """Where a rule gets ids and features from, for a batch at hand or for ids of the pool.

    ``source`` may be None, or may lack a pool, for a training loop of one's own; then features come from the first
    batch, and there is nothing to look up ids in.
    """

    def __init__(self, source: Any, level: Level, seed: int, first: TaskBatch | None = None) -> None:
        self.source, self.level, self.seed, self.first = source, level, seed, first
        self._latest: tuple[TaskBatch, Tensor] | None = None

    @property
    def size(self) -> int | None:
        """The number of tasks (or instances) in the pool, where it is known."""
        if self.level == "instance":
            return getattr(self.source, "instances", None)
        return getattr(self.source, "size", None)

    @property
    def pooled(self) -> bool:
        """Whether tasks can be looked up by id."""
        return (
            self.source is not None and hasattr(self.source, "draw") and getattr(self.source, "size", None) is not None
        )

    @property
    def by_id(self) -> bool:
        """Whether features can be had of ids alone, without a batch."""
        return hasattr(self.source, "features") or (self.level == "task" and self.pooled)

    def ids(self, batch: TaskBatch) -> Tensor | None:
        """The ids that weights are kept by: of tasks ``[m]`` or of query instances ``[m, K]``."""
        return batch.task_ids if self.level == "task" else batch.instance_ids

    def of_batch(self, batch: TaskBatch) -> Tensor:
        """Features ``[m, F]`` or ``[m, K, F]``."""
        if self._latest is None or self._latest[0] is not batch:  # a step asks three times
            ids = self.ids(batch)
            if hasattr(self.source, "features") and ids is not None:
                features = self.source.features(ids, level=self.level)
            else:
                features = random_features(batch, self.level, self.seed)
            self._latest = (batch, features)
        return self._latest[1]

    def of_ids(self, ids: Tensor) -> Tensor:
        """Features of any ids of the pool, ``[n, F]``."""
        if hasattr(self.source, "features"):
            return self.source.features(ids, level=self.level)
        if not self.by_id:
            raise ValueError(
                "features by id need a source with an ability features(ids, level=), or for tasks draw(ids); "
                "a learner that was loaded is told of it by prepare(train_source)"
            )
        return torch.cat([random_features(self.source.draw(part), "task", self.seed) for part in ids.split(1024)])

    def sample(self, count: int) -> Tensor:
        """Features of some of the pool, ``[n, F]``, n <= count: a pure function of the pool and the seed."""
        size = self.size
        if size is not None and self.by_id:
            if size <= count:
                return self.of_ids(torch.arange(size))
            chosen = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))[:count]
            return self.of_ids(chosen.sort().values)
        if hasattr(self.source, "peek"):
            batches = [self.source.peek(min(count, 256))]
        elif self.source is not None:
            batches = [self.source.sample(step, 32) for step in range(max(1, count // (32 * 8)))]
        elif self.first is not None:
            batches = [self.first]
        else:
            raise ValueError("a rule that looks at features needs a source, or a first batch")
        return torch.cat([self.of_batch(batch).flatten(0, -2) for batch in batches])[:count]


def random_features(batch: TaskBatch, level: Level, seed: int, width: int = 256) -> Tensor:
    """Random Fourier features of (x, y), ``[m, width]`` averaged over each task, or ``[m, K, width]``.

    Three bandwidths, since nothing is known of the scale at which tasks differ. Integer classes count as such;
    inputs of many dimensions are first projected to 32.
    """
    gen = torch.Generator().manual_seed(seed)
    dtype = torch.get_default_dtype()

    def points(x: Tensor, y: Tensor) -> Tensor:
        y = y.to(dtype).flatten(2) if y.is_floating_point() else y.to(dtype).reshape(*y.shape[:2], -1)
        return torch.cat([x.to(dtype).flatten(2), y], -1)

    z = points(batch.query_x, batch.query_y)
    if level == "task":
        z = torch.cat([points(batch.support_x, batch.support_y), z], 1)
    if z.shape[-1] > 34:
        z = z @ torch.randn(z.shape[-1], 32, generator=gen).to(z.device) / math.sqrt(z.shape[-1])
    scales = torch.tensor([0.3, 1.0, 3.0]).repeat_interleave(-(-width // 3))[:width]
    frequencies = (torch.randn(z.shape[-1], width, generator=gen) * scales).to(z.device, dtype)
    phases = (torch.rand(width, generator=gen) * 2 * math.pi).to(z.device, dtype)
    features = torch.cos(z @ frequencies + phases)
    return features.mean(1) if level == "task" else features
