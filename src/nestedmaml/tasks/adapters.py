"""Anything that yields tasks, as a source."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch

__all__ = ["as_source", "first_tasks"]

log = logging.getLogger("nestedmaml")


def as_source(tasks: Any) -> Any:
    """``tasks`` itself where it can ``sample(step, count)``; else a source over a list of batches or of tasks."""
    if hasattr(tasks, "sample"):
        return tasks
    if isinstance(tasks, TaskBatch):
        tasks = [tasks]
    if not isinstance(tasks, Iterable):
        raise TypeError(
            "a source has a method sample(step, count), or is a list of TaskBatch, or yields "
            f"(support_x, support_y, query_x, query_y); got {type(tasks).__name__}"
        )
    if isinstance(tasks, (list, tuple)):
        if not tasks:
            raise ValueError("a source needs at least one task, got an empty list")
        if all(isinstance(item, TaskBatch) for item in tasks):
            return Batches(list(tasks))
    log.warning("tasks without ids: no weights per task can be kept, and an interrupted run cannot resume exactly")
    return Stream(tasks)


def first_tasks(source: Any, count: int) -> TaskBatch:
    """Some tasks to look at before training, which training will see again."""
    return source.peek(count) if hasattr(source, "peek") else source.sample(0, count)


class Batches:
    """A list of ready batches, taken in turn; the count asked for is theirs."""

    def __init__(self, batches: list[TaskBatch]) -> None:
        self.batches = batches
        self.total = sum(map(len, batches))

    def sample(self, step: int, count: int) -> TaskBatch:
        """Batch ``step``, from the start again after the last."""
        return self.batches[step % len(self.batches)]


class Stream:
    """Single tasks, ``(support_x, support_y, query_x, query_y)`` each, stacked as they come."""

    def __init__(self, tasks: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        self.tasks = tasks
        self._rest: Iterator[Any] = iter(tasks)

    def peek(self, count: int) -> TaskBatch:
        """The next tasks, ``count`` or as many as there are, which stay the next."""
        items = list(itertools.islice(self._rest, count))
        self._rest = itertools.chain(items, self._rest)
        return self._stack(items)

    def sample(self, step: int, count: int) -> TaskBatch:
        """The next ``count`` tasks, from the start again after the last where the iterable allows it."""
        items = list(itertools.islice(self._rest, count))
        while len(items) < count:
            self._rest = iter(self.tasks)
            more = list(itertools.islice(self._rest, count - len(items)))
            if not more:
                raise ValueError(f"the tasks ran out: {count} were asked for, {len(items)} were left")
            items += more
        return self._stack(items)

    @staticmethod
    def _stack(items: list[Any]) -> TaskBatch:
        if not items:
            raise ValueError("the tasks ran out before training began")
        if any(len(item) != 4 for item in items):
            raise ValueError("each task must be (support_x, support_y, query_x, query_y)")
        support_x, support_y, query_x, query_y = (list(parts) for parts in zip(*items, strict=True))
        return TaskBatch(support_x, support_y, query_x, query_y)  # type: ignore[arg-type]
