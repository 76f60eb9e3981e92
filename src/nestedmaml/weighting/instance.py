"""A free weight per query instance, by its id: eq. ``instance-weighting``."""

from __future__ import annotations

from dataclasses import dataclass

from nestedmaml.weighting.features import Level
from nestedmaml.weighting.table import ById

__all__ = ["Instance"]


@dataclass(frozen=True, kw_only=True)
class Instance(ById):
    """One weight for each instance id; an image that returns in many tasks keeps its weight."""

    level: Level = "instance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level != "instance":
            raise ValueError("Instance weighs instances; for whole tasks use Task")
