"""Which training tasks an iteration sees: the pool's own batches, clean ones alone, or by learned weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.tasks.counter import integers, uniform

__all__ = ["clean_batch", "require_pool", "weighted_batch"]

CANDIDATES = 2048  # of a larger pool, this many tasks stand for it in each draw, at a cost that does not grow with it


def require_pool(source: Any, what: str) -> int:
    """The size of the pool, or an error that says what needs one."""
    size = getattr(source, "size", None)
    if size is None or not hasattr(source, "draw"):
        raise ValueError(f"{what} draws tasks by id: it needs a source with a size and draw(ids)")
    return int(size)


def weighted_batch(
    source: Any, weights_at: Callable[[Tensor], Tensor], step: int, count: int, *, explore: float, seed: int
) -> tuple[TaskBatch, Tensor]:
    """Tasks drawn with q = (1 - explore) w / sum w + explore / M, and their factors 1 / (M q).

    Where the pool is large, ``CANDIDATES`` of it, drawn uniformly, take the place of all M.
    """
    size = require_pool(source, "weighted sampling")
    if size <= CANDIDATES:
        ids = torch.arange(size)
    else:
        ids = torch.from_numpy(integers(seed, "candidates", step, np.arange(CANDIDATES), high=size))
    w = weights_at(ids).double().cpu().clamp_min(0)
    total = w.sum()
    share = w / total if total > 0 else torch.full_like(w, 1 / len(w))
    q = (1 - explore) * share + explore / len(w)
    points = torch.from_numpy(uniform(seed, "draw", step, np.arange(count)))
    chosen = torch.searchsorted(q.cumsum(0) / q.sum(), points, right=True).clamp_max(len(ids) - 1)
    return source.draw(ids[chosen]), 1 / (len(ids) * q[chosen])


def clean_batch(source: Any, step: int, count: int, *, seed: int) -> TaskBatch:
    """Clean tasks alone, drawn uniformly: what a skyline that refills sees."""
    size = require_pool(source, "refilling a batch with clean tasks")
    found: list[Tensor] = []
    for attempt in range(1000):
        ids = torch.from_numpy(integers(seed, "refill", step, attempt, np.arange(4 * count), high=size))
        found.append(ids[~source.corrupt(ids, level="task")])
        if sum(map(len, found)) >= count:
            return source.draw(torch.cat(found)[:count])
    raise ValueError("the source has next to no clean tasks to fill a batch with")
