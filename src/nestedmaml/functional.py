"""The mathematics of NestedMAML, as pure functions of parameters, tasks and weights.

The paper's symbols: ``params`` is theta, ``lr`` is alpha, ``adapt`` is Alg(theta, S), ``weights`` are w, ``meta_lr`` is
eta. The gradients through Alg are in `adaptation`; here they are weighted, combined and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nestedmaml.adaptation import Adaptation, Batching, Loss, Params, Rate
from nestedmaml.tasks.batch import TaskBatch

__all__ = ["adapt", "meta_gradient", "query_losses", "weight_gradient"]


# ---------------------------------------------------------------------------------------------------------
# The contract
# ---------------------------------------------------------------------------------------------------------


def adapt(
    model: nn.Module,
    params: Mapping[str, Tensor],
    support_x: Tensor,
    support_y: Tensor,
    *,
    loss: Loss,
    lr: Rate,
    steps: int,
    order: int = 2,
    inner: Iterable[str] | None = None,
    support_weights: Tensor | None = None,
) -> Params:
    """Alg(theta, S) of eq. ``param-adaptation`` for one task: the adapted parameters, a dict like ``params``.

    Differentiable in ``params`` and ``lr``; with ``order=1`` the steps count as constants.
    ``inner`` names the parameters that adapt (a module's name stands for all of its parameters); default all.
    ``support_weights [S]`` weigh the support losses, whose sum is divided by S.
    """
    if len(support_x) == 0 or support_x.shape[:1] != support_y.shape[:1]:
        raise ValueError(
            "support_x and support_y must hold the same number of instances, at least one, got "
            f"{list(support_x.shape)} and {list(support_y.shape)}"
        )
    for name, value in (("support_x", support_x), ("support_y", support_y)):
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    alg = Adaptation(model, params, loss=loss, lr=lr, steps=steps, order=order, inner=inner)
    alg.refuse_changing_buffers(support_x)
    weights = _support_weights(support_weights, alg.theta, support_x, support_x.shape[:1])
    return {**params, **alg.path(alg.theta, support_x, support_y, weights)[-1]}


def query_losses(
    model: nn.Module,
    params: Mapping[str, Tensor],
    batch: TaskBatch,
    *,
    loss: Loss,
    lr: Rate,
    steps: int,
    order: int = 2,
    inner: Iterable[str] | None = None,
    support_weights: Tensor | None = None,
    batching: Batching = "auto",
) -> Tensor:
    """The loss of every query instance after adaptation, ``[m, K]``, differentiable in ``params``."""
    batch.require_finite()
    alg = Adaptation(model, params, loss=loss, lr=lr, steps=steps, order=order, inner=inner, batching=batching)
    support = _support_weights(support_weights, alg.theta, batch.support_x, batch.support_x.shape[:2])
    return alg.over_tasks(alg.query_values, alg.theta, batch, support)


@torch.no_grad()
def meta_gradient(
    model: nn.Module,
    params: Mapping[str, Tensor],
    batch: TaskBatch,
    weights: Tensor,
    *,
    loss: Loss,
    lr: Rate,
    steps: int,
    order: int = 2,
    inner: Iterable[str] | None = None,
    support_weights: Tensor | None = None,
    batching: Batching = "auto",
) -> Params:
    """The gradient of the weighted meta-loss, eq. ``instance-weighting``, at ``params``.

    ``weights [m]`` multiply each task's mean query loss, ``weights [m, K]`` each query loss; both sums are
    divided by m. ``order=1`` drops the Hessians of the adaptation.
    """
    batch.require_finite()
    check_weights(weights, batch)
    alg = Adaptation(model, params, loss=loss, lr=lr, steps=steps, order=order, inner=inner, batching=batching)
    _, grads = task_gradients(alg, alg.theta, batch, weights, support_weights)
    return alg.complete(params, combine(grads, weights))


@torch.no_grad()
def weight_gradient(
    model: nn.Module,
    params: Mapping[str, Tensor],
    train: TaskBatch,
    val: TaskBatch,
    weights: Tensor,
    *,
    loss: Loss,
    inner_lr: Rate,
    inner_steps: int,
    meta_lr: float,
    val_steps: int | None = None,
    order: Literal["exact", "first"] = "exact",
    inner: Iterable[str] | None = None,
    support_weights: Tensor | None = None,
    batching: Batching = "auto",
) -> Tensor:
    """The derivative of the validation meta-loss at theta_W with respect to ``weights``, of their shape.

    theta_W = theta - meta_lr * meta_gradient is eq. ``online-equation``; minus gamma times the result is the
    update of eq. ``online-equation-weight`` and of Lemma 1. ``order="first"`` leaves out the Hessian of the
    validation adaptation, eq. ``weight-update-appr``. ``val_steps``: steps of the validation adaptation,
    ``inner_steps`` where None. ``support_weights`` are those of the training tasks, and count as constants.
    """
    train.require_finite()
    val.require_finite()
    check_weights(weights, train)
    if order not in ("exact", "first"):
        raise ValueError(f"order must be 'exact' or 'first', got {order!r}")
    if not math.isfinite(meta_lr) or meta_lr < 0:
        raise ValueError(f"meta_lr must be a number >= 0, got {meta_lr}")
    options: dict[str, Any] = {"loss": loss, "lr": inner_lr, "inner": inner, "batching": batching}
    alg = Adaptation(model, params, steps=inner_steps, **options)
    val_steps = inner_steps if val_steps is None else val_steps
    val_alg = Adaptation(model, params, steps=val_steps, order=2 if order == "exact" else 1, **options)

    _, grads = task_gradients(alg, alg.theta, train, weights, support_weights)
    lookahead = descend(alg.theta, combine(grads, weights), meta_lr)
    _, val_grads = task_gradients(val_alg, lookahead, val)
    v = combine(val_grads)
    if weights.ndim == 1:
        slopes = align(grads, v)
    else:
        slopes = query_slopes(alg, alg.theta, train, v, support_weights)
    return slopes.mul(-meta_lr / len(train)).to(weights.dtype)


# ---------------------------------------------------------------------------------------------------------
# Many tasks: what the methods combine
# ---------------------------------------------------------------------------------------------------------


def task_gradients(
    alg: Adaptation,
    theta: Params,
    batch: TaskBatch,
    weights: Tensor | None = None,
    support_weights: Tensor | None = None,
) -> tuple[Tensor, Params]:
    """Per task: query losses ``[m, K]`` and the gradient of their mean, or with ``weights [m, K]`` of that sum."""
    support = _support_weights(support_weights, theta, batch.support_x, batch.support_x.shape[:2])
    if weights is not None and weights.ndim == 2:
        query = weights.detach()
    else:
        shape = batch.query_x.shape[:2]
        query = torch.full(shape, 1 / shape[1], dtype=_real(theta), device=batch.query_x.device)
    return alg.over_tasks(alg.task_gradient, theta, batch, support, query)


def query_slopes(
    alg: Adaptation, theta: Params, batch: TaskBatch, direction: Params, support_weights: Tensor | None = None
) -> Tensor:
    """The derivative of each query loss along one direction, ``[m, K]``: K weights for one more derivative."""
    support = _support_weights(support_weights, theta, batch.support_x, batch.support_x.shape[:2])
    return alg.over_tasks(alg.query_slope, theta, batch, support, shared=[direction[n] for n in theta])


def combine(grads: Params, weights: Tensor | None = None) -> Params:
    """(1/m) sum_i w_i g_i, eq. ``online-equation``; instance weights are in the g_i already.

    A task of weight zero adds exactly zero, even where its own gradient has become infinite.
    """
    if weights is None or weights.ndim == 2:
        return {n: g.mean(0) for n, g in grads.items()}
    out = {}
    for n, g in grads.items():
        w = weights.detach().to(g.dtype).view(-1, *[1] * (g.ndim - 1))
        out[n] = (w * g.masked_fill(w == 0, 0)).mean(0)
    return out


def align(grads: Params, v: Params) -> Tensor:
    """The inner products <g_i, v> of per-task gradients with one direction, ``[m]``."""
    return torch.stack([grads[n].reshape(len(grads[n]), -1) @ v[n].reshape(-1) for n in v]).sum(0)


def descend(theta: Params, gradient: Params, lr: float) -> Params:
    """One step of gradient descent."""
    return {n: p - lr * gradient[n] for n, p in theta.items()}


# ---------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------


def check_weights(weights: Tensor, batch: TaskBatch) -> None:
    """Raise unless ``weights`` are finite numbers, one per task or one per query instance."""
    m, k = len(batch), batch.queries
    if tuple(weights.shape) not in ((m,), (m, k)):
        raise ValueError(f"weights must be [m] = [{m}] or [m, K] = [{m}, {k}], got {list(weights.shape)}")
    if not weights.is_floating_point():
        raise TypeError(f"weights must be real numbers, got {weights.dtype}")
    if not bool(weights.isfinite().all()):
        raise ValueError("weights must be finite, got NaN or infinity")


def _support_weights(weights: Tensor | None, theta: Params, support_x: Tensor, shape: torch.Size) -> Tensor:
    if weights is None:
        return torch.ones(shape, dtype=_real(theta), device=support_x.device)
    if weights.shape == shape and not bool(weights.isfinite().all()):
        raise ValueError("support_weights must be finite, got NaN or infinity")
    if weights.shape != shape:
        raise ValueError(f"support_weights must be {list(shape)}, got {list(weights.shape)}")
    return weights


def _real(theta: Params) -> torch.dtype:
    return next(iter(theta.values())).dtype
