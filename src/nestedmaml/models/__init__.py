"""Small backbones, and `prepare` for models with running statistics."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from nestedmaml.models.mlp import mlp
from nestedmaml.models.prepare import prepare

__all__ = ["build", "mlp", "prepare"]

BUILT_IN = {"mlp": mlp}


def build(spec: Mapping[str, Any]) -> nn.Module:
    """A built-in model from the description it carries as ``spec``."""
    options = dict(spec)
    name = options.pop("name", None)
    if name not in BUILT_IN:
        raise ValueError(f"there is no built-in model {name!r}; there are {', '.join(BUILT_IN)}")
    return BUILT_IN[name](**options)
