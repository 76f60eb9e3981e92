"""A method's options as JSON and back, from fixed tables: nothing is imported by a name that a file holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nestedmaml import checkpoint, losses, weighting
from nestedmaml.methods import Method

__all__ = ["from_json", "to_json"]

_RULES = {n: getattr(weighting, n) for n in ("Amortised", "Cluster", "Instance", "Task", "Uniform")}
_LOSSES = {n: getattr(losses, n) for n in losses.__all__}


def to_json(method: Method) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options as JSON, and tensors among them."""
    out: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for f in dataclasses.fields(method):
        if not f.init:
            continue
        value = getattr(method, f.name)
        if f.name == "loss":
            value = next((n for n, fn in _LOSSES.items() if fn is value), None)
        elif isinstance(value, weighting.Rule):
            value = {"rule": type(value).__name__, **dataclasses.asdict(value)}
        elif isinstance(value, type):
            value = value.__name__
        elif isinstance(value, dict):
            tensors |= {f"{f.name}/{k}": torch.as_tensor(v) for k, v in value.items()}
            value = {"tensors": f.name}
        elif value is not None and not isinstance(value, (str, int, float, bool)):
            value = list(value)
        out[f.name] = value
    return out, tensors


def from_json(
    kind: type[Method], options: dict[str, Any], tensors: dict[str, Tensor], loss: Callable[..., Any] | None
) -> dict[str, Any]:
    """The options as the method's class takes them."""
    out = dict(options)
    if loss is None:
        if out["loss"] is None:
            raise ValueError("the loss is not built in: pass it as loss=")
        loss = _LOSSES[out["loss"]]
    out["loss"] = loss
    for name, value in out.items():
        if isinstance(value, dict) and "rule" in value:
            out[name] = _RULES[value["rule"]](**{k: v for k, v in value.items() if k != "rule"})
        elif isinstance(value, dict) and "tensors" in value:
            out[name] = checkpoint.unflatten(tensors, value["tensors"])
    return out
