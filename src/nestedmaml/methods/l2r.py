"""Learning to reweight (Ren, Zeng, Yang and Urtasun, ICML 2018), adapted to tasks as the NestedMAML paper does.

Nothing is remembered: every batch starts from weights of zero, so that the look-ahead point is theta itself, and one
look-ahead step says who would help validation. The rectified, normalised help is the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from nestedmaml.functional import align, query_slopes, task_gradients
from nestedmaml.methods.method import (
    Figures,
    Method,
    State,
    count,
    guarded,
    meta_step,
    positive,
    trainable,
    validation_gradient,
    weighted_mean,
)
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting import Knowledge

__all__ = ["L2R"]


@dataclass(kw_only=True)
class L2R(Method):
    """MAML whose weights are found anew for each batch, from clean validation tasks.

    Args:
        level: weigh whole tasks ("task") or single query instances ("instance").
        order: "exact", or "first": without the Hessian of the validation adaptation.
        val_steps: steps of the validation adaptation.
        guard: a training task whose gradient is this many times as long as a typical validation task's counts as
            diverged, and is left out.
    """

    level: Literal["task", "instance"] = "task"
    order: Literal["exact", "first"] = "exact"
    val_steps: int = 1
    guard: float = 100.0

    needs_val: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in ("task", "instance"):
            raise ValueError(f"level must be 'task' or 'instance', got {self.level!r}")
        if self.order not in ("exact", "first"):
            raise ValueError(f"order must be 'exact' or 'first', got {self.order!r}")
        positive(self, "guard")
        count(self, "val_steps")

    @torch.no_grad()
    def step(
        self,
        state: State,
        model: nn.Module,
        train: TaskBatch,
        val: TaskBatch | None,
        *,
        knowledge: Knowledge | None = None,
        correction: Tensor | None = None,
        truth: Callable[[Tensor, str], Tensor] | None = None,
    ) -> Figures:
        """Weights for this batch, and a meta-step with them."""
        if val is None:
            raise ValueError("L2R needs validation tasks: pass a val_source to fit, or a val_batch to step")
        alg = self.adaptation(model, state.params)
        theta = trainable(alg, state.params)

        val_alg = self.adaptation(model, state.params, steps=self.val_steps, order=2 if self.order == "exact" else 1)
        v, val_loss, lost = validation_gradient(state, val_alg, theta, val)

        losses, grads = task_gradients(alg, theta, train)
        limit = self.guard * state.loudness if state.loudness else float("inf")
        grads, sound, _ = guarded(grads, limit)
        if self.level == "task":
            w = rectified(align(grads, v))
        else:
            w = rectified(query_slopes(alg, theta, train, v).masked_fill(~sound[:, None], 0))
            _, grads = task_gradients(alg, theta, train, w)
            grads, _, _ = guarded(grads, limit)
        counts = w if self.level == "task" else (w != 0).any(1).to(w.dtype)
        gradient = weighted_mean(grads, counts)
        if gradient is not None:
            meta_step(state, gradient)
        state.step += 1
        return {
            "train_loss": losses[sound].mean().item(),
            "val_loss": val_loss,
            "weight_mean": w.mean().item(),
            "diverged": float((~sound).sum()) + lost,
        }


def rectified(slopes: Tensor) -> Tensor:
    """Weights in proportion to the positive ``slopes``, of which each has minus the sign of d(validation) / dw.

    They sum to m (``[m]`` tasks, or ``[m, K]`` instances), or all are zero. The step size of the look-ahead is a
    factor of all slopes, and drops out.
    """
    help = torch.where(slopes.isfinite(), slopes, 0.0).clamp_min(0).double()
    total = help.sum()
    return torch.where(total > 0, help * (len(slopes) / total.clamp_min(1e-300)), 0.0).to(slopes.dtype)
