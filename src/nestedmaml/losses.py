"""Losses with one value per instance, unreduced, as the weights need them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy", "squared_error"]


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Squared error of each instance, averaged over its outputs: ``[n, ...]`` to ``[n]``."""
    if prediction.shape != target.shape:
        raise ValueError(
            f"squared_error needs predictions and targets of one shape, got {tuple(prediction.shape)} "
            f"and {tuple(target.shape)}"
        )
    return (prediction - target).square().flatten(1).mean(1) if prediction.ndim > 1 else (prediction - target).square()


def cross_entropy(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each instance: logits ``[n, ways]`` and integer classes ``[n]`` to ``[n]``."""
    if prediction.ndim != 2 or target.shape != prediction.shape[:1]:
        raise ValueError(
            f"cross_entropy needs logits [n, ways] and classes [n], got {tuple(prediction.shape)} "
            f"and {tuple(target.shape)}"
        )
    return F.cross_entropy(prediction, target, reduction="none")
