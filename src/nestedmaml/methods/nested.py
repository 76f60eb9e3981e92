"""NestedMAML (Killamsetty, Li, Zhao, Iyer and Chen, AAAI 2022): Algorithm 1, exact and first-order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from nestedmaml.adaptation import Adaptation, Params
from nestedmaml.functional import align, combine, descend, query_slopes, task_gradients
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
from nestedmaml.weighting import Cluster, Knowledge, Rule

__all__ = ["NestedMAML"]


@dataclass(kw_only=True)
class NestedMAML(Method):
    """MAML that learns what each task, cluster or instance should count, from clean validation tasks.

    Args:
        order: "exact", or "first": without the Hessian of the validation adaptation (NestedMAML-FO).
        weighting: who shares a weight with whom, and how weights move: a rule of ``nestedmaml.weighting``.
        weight_lr: gamma, the step size of the weights; a rule may bring its own.
        val_steps: steps of the validation adaptation, 1 in Lemma 1.
        lookahead_lr: eta of theta_W, eq. ``online-equation``; None is ``meta_lr``.
        sampling: "uniform", or "weighted": tasks are drawn in proportion to their weights, mixed with ``explore``
            uniform ones, and importance-corrected, so that the meta-loss is still the weighted mean over the pool.
        explore: see sampling.
        val_average: decay of a running average of the validation gradient (0: none), so that fewer validation tasks
            an iteration give the same signal.
        val_share: share of the meta-step that the validation gradient has (0: the paper's, which trains on training
            tasks alone). Validation tasks are clean, and their gradient is computed anyway.
        guard: a training task whose gradient is this many times as long as a typical validation task's counts as
            diverged, and is left out.
        clip: a training task's gradient enters the meta-step no longer than this many times a typical validation
            task's: what little weight a corrupt task keeps, its loudness cannot make up for. None does not clip.
    """

    order: Literal["exact", "first"] = "exact"
    weighting: Rule = field(default_factory=Cluster)
    weight_lr: float = 1.0
    val_steps: int = 1
    lookahead_lr: float | None = None
    sampling: Literal["uniform", "weighted"] = "uniform"
    explore: float = 0.1
    val_average: float = 0.0
    val_share: float = 0.0
    guard: float = 100.0
    clip: float | None = None

    needs_val: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("exact", "first"):
            raise ValueError(f"order must be 'exact' or 'first', got {self.order!r}")
        if self.sampling not in ("uniform", "weighted"):
            raise ValueError(f"sampling must be 'uniform' or 'weighted', got {self.sampling!r}")
        if not isinstance(self.weighting, Rule):
            raise TypeError(
                f"weighting must be a rule such as nestedmaml.weighting.Cluster(200), got {self.weighting!r}"
            )
        if self.sampling == "weighted" and self.weighting.level != "task":
            raise ValueError("weighted sampling draws whole tasks: it needs weights at task level")
        positive(self, "weight_lr", "lookahead_lr", "guard", "clip")
        count(self, "val_steps")
        for name, high in (("explore", 1.0), ("val_average", 1.0), ("val_share", 1.0)):
            if not 0 <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if self.sampling == "weighted" and self.explore == 0:
            raise ValueError("weighted sampling needs explore > 0, or a task of weight zero could never come back")

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
        truth: Any = None,
    ) -> Figures:
        """One iteration of Algorithm 1."""
        if val is None or knowledge is None or state.rule is None:
            raise ValueError("NestedMAML needs validation tasks: pass a val_source to fit, or a val_batch to step")
        rule, by_instance = self.weighting, self.weighting.level == "instance"
        alg = self.adaptation(model, state.params)
        theta = trainable(alg, state.params)
        dtype, m = next(iter(theta.values())).dtype, len(train)
        device = next(iter(theta.values())).device
        c = torch.ones(m, dtype=dtype, device=device) if correction is None else correction.to(device, dtype)

        # line 7: the gradient of each task (in the instance-level form weighted inside), once for all uses
        w = rule.weights(state.rule, knowledge, train).to(device, dtype)
        losses, grads = task_gradients(alg, theta, train, w if by_instance else None)
        if not state.loudness:  # what a typical validation task's gradient is has to be known before the first step
            validation_gradient(state, self._validation_alg(model, state), theta, val)
        limit = self.guard * state.loudness if state.loudness else float("inf")
        grads, sound, length = guarded(grads, limit)
        shrink = self._clipped(state, length).where(sound, 0.0)
        inside = shrink if by_instance else shrink * c

        # line 8: theta_W, and the validation gradient there
        eta = self.meta_lr if self.lookahead_lr is None else self.lookahead_lr
        lookahead = descend(theta, combine(grads, inside if by_instance else w * inside), eta)
        v, val_loss, lost = self._validation_gradient(state, model, lookahead, val)

        # line 9: the weights
        if by_instance:
            slopes = query_slopes(alg, theta, train, v)
            slopes = slopes.masked_fill(~sound[:, None], 0)
        else:
            slopes = align(grads, v)
        hypergradient = slopes * (-eta / m) * (inside[:, None] if by_instance else inside)
        state.rule = rule.update(
            state.rule, knowledge, train, hypergradient, lr=self.weight_lr, norms=(shrink * length).where(sound, 1.0),
            correction=None if by_instance else c,
        )  # fmt: skip

        # line 11: the meta-step with the new weights, eq. model-update
        w = rule.weights(state.rule, knowledge, train).to(device, dtype)
        if by_instance:
            _, grads = task_gradients(alg, theta, train, w)
            grads, still, length = guarded(grads, limit)
            sound &= still
            inside = self._clipped(state, length).where(sound, 0.0)
        gradient = weighted_mean(grads, inside if by_instance else w * inside)
        if self.val_share and (gradient is not None or lost < len(val)):
            s = self.val_share
            zero = {n: torch.zeros_like(g) for n, g in v.items()}
            gradient = {n: (1 - s) * g + s * v[n] for n, g in (gradient or zero).items()}
        if gradient is not None:
            meta_step(state, gradient)
        state.step += 1
        return {
            "train_loss": losses[sound].mean().item(),
            "val_loss": val_loss,
            "weight_mean": w.mean().item(),
            "diverged": float((~sound).sum()) + lost,
        }

    def _clipped(self, state: State, length: Tensor) -> Tensor:
        """The factor that brings each task's gradient down to ``clip`` times a typical validation task's."""
        if self.clip is None or not state.loudness:
            return torch.ones_like(length)
        return (self.clip * state.loudness / length.clamp_min(torch.finfo(length.dtype).tiny)).clamp_max(1)

    def _validation_alg(self, model: nn.Module, state: State) -> Adaptation:
        """The adaptation to validation tasks, whose steps and order are its own."""
        order = 2 if self.order == "exact" else 1
        return self.adaptation(model, state.params, steps=self.val_steps, order=order)

    def _validation_gradient(
        self, state: State, model: nn.Module, lookahead: Params, val: TaskBatch
    ) -> tuple[Params, float, float]:
        """The mean gradient of the validation meta-loss at theta_W, its loss, and how many tasks diverged."""
        v, loss, lost = validation_gradient(state, self._validation_alg(model, state), lookahead, val)
        if self.val_average:
            if state.average is not None:
                a = self.val_average
                v = {n: a * state.average[n] + (1 - a) * g for n, g in v.items()}
            state.average = v
        return v, loss, lost
