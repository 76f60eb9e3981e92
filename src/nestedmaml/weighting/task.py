"""A free weight per task, eq. ``online-equation-weight`` to the letter."""

from __future__ import annotations

from dataclasses import dataclass

from nestedmaml.weighting.table import ById

__all__ = ["Task"]


@dataclass(frozen=True, kw_only=True)
class Task(ById):
    """One weight for each task id. Of 10,000 tasks each is seen a few times only, so these learn slowly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level != "task":
            raise ValueError("Task weighs tasks; for single instances use Instance")
