"""Model-agnostic meta-learning (Finn, Abbeel and Levine, ICML 2017), and the paper's two skylines.

The skylines, MAML-OOD-RM and MAML-Noise-RM, know the truth and give weight zero to what is corrupt: they are what
learned weights are measured against, and the only methods that may ask a source for the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nestedmaml.functional import task_gradients
from nestedmaml.methods.method import Figures, Method, State, guarded, meta_step, trainable, typical_norm, weighted_mean
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting import Knowledge

__all__ = ["MAML"]

GUARD = 1000.0  # a task whose gradient is this many times as long as its batches' usual one has diverged


@dataclass(kw_only=True)
class MAML(Method):
    """MAML, exact (``order=2``) or first-order (``order=1``).

    Args:
        order: 2 differentiates through the inner steps, 1 takes them as constants.
        remove: a skyline: give weight zero to corrupt "tasks", to flipped "query" instances, or to flipped instances
            of "query+support". What is clean keeps its weight; a batch without anything clean makes no step.
        refill: fill the batch with clean tasks instead: the bound for a method that also chooses what to sample.
    """

    order: Literal[1, 2] = 2
    remove: Literal["tasks", "query", "query+support"] | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order!r}")
        if self.remove not in (None, "tasks", "query", "query+support"):
            raise ValueError(f"remove must be None, 'tasks', 'query' or 'query+support', got {self.remove!r}")
        if self.refill and self.remove != "tasks":
            raise ValueError("refill fills a batch with clean tasks: it needs remove='tasks'")

    @property
    def needs_truth(self) -> bool:  # type: ignore[override]
        """Whether this is a skyline."""
        return self.remove is not None

    @torch.no_grad()
    def step(
        self,
        state: State,
        model: nn.Module,
        train: TaskBatch,
        val: TaskBatch | None = None,
        *,
        knowledge: Knowledge | None = None,
        correction: Tensor | None = None,
        truth: Callable[[Tensor, str], Tensor] | None = None,
    ) -> Figures:
        """One meta-step on the mean query loss."""
        alg = self.adaptation(model, state.params, order=self.order)
        theta = trainable(alg, state.params)
        query, support = self._clean_instances(train, truth, next(iter(theta.values())).dtype)
        losses, grads = task_gradients(alg, theta, train, query, support)
        typical = typical_norm(grads)
        limit = GUARD * (state.loudness or typical)
        grads, sound, _ = guarded(grads, limit)
        if typical <= limit < math.inf:
            state.loudness = 0.95 * state.loudness + 0.05 * typical if state.loudness else typical
        weights = sound.to(losses.dtype)
        if self.remove == "tasks":
            weights = weights * ~ask(truth, train.task_ids, "task").to(weights.device)
        elif query is not None:
            weights = weights * (query != 0).any(1)
        gradient = weighted_mean(grads, weights)
        if gradient is not None:
            meta_step(state, gradient)
        state.step += 1
        return {"train_loss": losses[sound].mean().item(), "diverged": float((~sound).sum())}

    def _clean_instances(
        self, train: TaskBatch, truth: Callable[[Tensor, str], Tensor] | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.remove in (None, "tasks"):
            return None, None
        device = train.query_x.device
        query = (~ask(truth, train.instance_ids, "instance")).to(device, dtype) / train.queries
        if self.remove == "query":
            return query, None
        return query, (~ask(truth, train.support_ids, "instance")).to(device, dtype)


def ask(truth: Callable[[Tensor, str], Tensor] | None, ids: Tensor | None, level: str) -> Tensor:
    """What is corrupt, from a source that knows and a batch that has ids."""
    if truth is None or ids is None:
        raise ValueError(f"a skyline needs a source that can tell which {level}s are corrupt, by corrupt(ids, level=)")
    return truth(ids.cpu(), level)
