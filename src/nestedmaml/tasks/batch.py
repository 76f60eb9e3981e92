"""`TaskBatch`: few-shot tasks of one size, stacked on the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Stackable = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class TaskBatch:
    """``m`` tasks, each with a support set of ``S`` and a query set of ``K`` instances.

    Shapes: ``support_x [m, S, ...]``, ``support_y [m, S, ...]``, ``query_x [m, K, ...]``,
    ``query_y [m, K, ...]``; ids are int64: ``task_ids [m]``, ``support_ids [m, S]``,
    ``instance_ids [m, K]`` (those of the query instances). A sequence of one tensor per task is stacked.
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    task_ids: Tensor | None = None
    support_ids: Tensor | None = None
    instance_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("support_x", "support_y", "query_x", "query_y"):
            object.__setattr__(self, name, _stack(name, getattr(self, name)))
        m = len(self.support_x)
        if m == 0:
            raise ValueError("a TaskBatch needs at least one task, got zero")
        for part in ("support", "query"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            if x.ndim < 2 or y.ndim < 2 or x.shape[:2] != y.shape[:2] or len(x) != m or x.shape[1] == 0:
                raise ValueError(
                    f"{part}_x and {part}_y must be [m, n, ...] with the same m = {m} and n > 0, "
                    f"got {tuple(x.shape)} and {tuple(y.shape)}"
                )
        if self.support_x.shape[2:] != self.query_x.shape[2:]:
            raise ValueError(
                "support and query instances must have one shape, got "
                f"{tuple(self.support_x.shape[2:])} and {tuple(self.query_x.shape[2:])}"
            )
        if self.support_y.shape[2:] != self.query_y.shape[2:]:
            raise ValueError(
                "support and query targets must have one shape, got "
                f"{tuple(self.support_y.shape[2:])} and {tuple(self.query_y.shape[2:])}"
            )
        wanted = {
            "task_ids": (m,),
            "support_ids": tuple(self.support_x.shape[:2]),
            "instance_ids": tuple(self.query_x.shape[:2]),
        }
        for name, shape in wanted.items():
            ids = getattr(self, name)
            if ids is None:
                continue
            if ids.dtype != torch.int64 or tuple(ids.shape) != shape:
                raise ValueError(f"{name} must be int64 {list(shape)}, got {ids.dtype} {list(ids.shape)}")

    def __len__(self) -> int:
        return len(self.support_x)

    @property
    def shots(self) -> int:
        """Number of support instances of a task, ``S``."""
        return self.support_x.shape[1]

    @property
    def queries(self) -> int:
        """Number of query instances of a task, ``K``."""
        return self.query_x.shape[1]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TaskBatch:
        """The same tasks on a device, inputs and real-valued targets in ``dtype``."""

        def move(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        return TaskBatch(*(move(getattr(self, f.name)) for f in fields(self)))  # type: ignore[arg-type]

    def take(self, index: Tensor | slice) -> TaskBatch:
        """The tasks at ``index``."""
        parts = (getattr(self, f.name) for f in fields(self))
        return TaskBatch(*(None if part is None else part[index] for part in parts))  # type: ignore[arg-type]

    def require_finite(self) -> None:
        """Raise a ValueError that names the part and the tasks that hold NaN or infinity."""
        for name in ("support_x", "support_y", "query_x", "query_y"):
            value = getattr(self, name)
            if value.is_floating_point() and not bool(value.isfinite().all()):
                bad = (~value.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
                raise ValueError(f"{name} must be finite, but tasks {bad[:10]} of the batch hold NaN or infinity")


def _stack(name: str, value: Stackable) -> Tensor:
    if isinstance(value, Tensor):
        return value
    parts = list(value)
    if not parts:
        raise ValueError(f"a TaskBatch needs at least one task, got zero in {name}")
    if not all(isinstance(part, Tensor) for part in parts):
        kinds = sorted({type(part).__name__ for part in parts})
        raise TypeError(f"{name} must be a tensor or a sequence of tensors, got a sequence of {', '.join(kinds)}")
    sizes = [tuple(part.shape) for part in parts]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"tasks of different sizes cannot share a batch: {name} has {', '.join(map(str, dict.fromkeys(sizes)))}"
        )
    return torch.stack(parts)
