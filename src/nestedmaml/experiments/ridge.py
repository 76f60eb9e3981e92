"""A strongly convex problem for the convergence theorem: ridge-regularised linear regressions, a share of them corrupt.

The targets of corrupt tasks come from another linear map. With one inner step, as in the theorem, the meta-loss of a
task is a quadratic, and its gradient is affine,

    g(theta) = J (A_q phi - b_q) = P theta - q,    phi = theta - alpha (A_s theta - b_s),    J = I - alpha A_s,

so that many runs are cheap. `Reference` is the same problem as a model, a loss and batches for
`nestedmaml.functional`, which the tests hold this closed form against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["Array", "Problem", "Reference", "Tasks", "batches"]

Array = NDArray[np.float64]

WIDTH, INSTANCES, RIDGE, CORRUPT = 5, 12, 0.2, 0.5
POOL, VALIDATION, BATCH, VAL_BATCH = 20, 12, 5, 4  # M, N, m, n


@dataclass(frozen=True)
class Tasks:
    """Linear regressions: inputs ``[tasks, n, d]``, targets ``[tasks, n]``, and the map of each, ``[tasks, d]``."""

    support_x: Array
    support_y: Array
    query_x: Array
    query_y: Array

    @cached_property
    def support(self) -> tuple[Array, Array]:
        """A_s and b_s: the support loss has gradient A theta - b, and Hessian A."""
        return _normal_equations(self.support_x, self.support_y)

    @cached_property
    def query(self) -> tuple[Array, Array]:
        """A_q and b_q."""
        return _normal_equations(self.query_x, self.query_y)

    def gradient(self, alpha: float) -> tuple[Array, Array]:
        """P ``[tasks, d, d]`` and q ``[tasks, d]``: the meta-gradient of a task is P theta - q."""
        (a_s, b_s), (a_q, b_q) = self.support, self.query
        jacobian = np.eye(WIDTH) - alpha * a_s
        target = b_q - alpha * (a_q @ b_s[..., None])[..., 0]
        return jacobian @ a_q @ jacobian, (jacobian @ target[..., None])[..., 0]


@dataclass(frozen=True)
class Problem:
    """A pool of M training tasks, exactly `CORRUPT` of them corrupt, N clean validation tasks, and a start."""

    train: Tasks
    val: Tasks
    corrupt: NDArray[np.bool_]
    start: Array

    @classmethod
    def draw(cls, seed: int) -> Problem:
        """Clean tasks have maps around one centre, corrupt tasks around another, all with noise on the targets."""
        rng = np.random.default_rng([seed, 0])
        centre, other, start = 2 * _unit(rng), 2 * _unit(rng), 2 * _unit(rng)
        corrupt = rng.permutation(POOL) < round(CORRUPT * POOL)

        def tasks(centres: Array) -> Tasks:
            maps = centres + 0.3 * rng.standard_normal(centres.shape)
            x = rng.standard_normal((len(maps), 2 * INSTANCES, WIDTH)) / math.sqrt(2)
            y = (x @ maps[..., None])[..., 0] + 0.1 * rng.standard_normal(x.shape[:2])
            return Tasks(x[:, :INSTANCES], y[:, :INSTANCES], x[:, INSTANCES:], y[:, INSTANCES:])

        train = tasks(np.where(corrupt[:, None], other, centre))
        return cls(train, tasks(np.tile(centre, (VALIDATION, 1))), corrupt, start)

    @cached_property
    def _spectrum(self) -> Array:
        return np.concatenate([np.linalg.eigvalsh(a) for t in (self.train, self.val) for a, _ in (t.support, t.query)])

    @property
    def smoothness(self) -> float:
        """L: the largest eigenvalue of any loss's Hessian X'X / n + ridge I, over support and query sets."""
        return float(self._spectrum.max())

    @property
    def convexity(self) -> float:
        """mu: the smallest eigenvalue of any of these Hessians, at least the ridge."""
        return float(self._spectrum.min())

    @property
    def alpha(self) -> float:
        """Alpha = 1 / (2 L), the largest the theorem allows.

        Its second bound, mu / (8 rho B), is void here: the losses are quadratic, so the Lipschitz constant B of the
        Hessian is zero.
        """
        return 1 / (2 * self.smoothness)

    @cached_property
    def radius(self) -> float:
        """The ball around zero in which gradients are bounded: it holds the start and every loss's minimum."""
        minima = [np.linalg.solve(a, b[..., None])[..., 0] for t in (self.train, self.val) for a, b in _losses(t)]
        return float(np.linalg.norm(np.concatenate([*minima, self.start[None]]), axis=1).max())

    @cached_property
    def bound(self) -> float:
        """rho: a bound of every loss's gradient ||A theta - b|| over the ball of `radius`.

        No quadratic has a bounded gradient on the whole space, so it is meant where the runs are; the points say
        whether they stayed there.
        """
        both = [loss for t in (self.train, self.val) for loss in _losses(t)]
        return float(
            max((np.linalg.norm(a, 2, (1, 2)) * self.radius + np.linalg.norm(b, axis=1)).max() for a, b in both)
        )

    @cached_property
    def sigma(self) -> float:
        """sigma: the standard deviation of the stochastic weight gradient at the start, per unit of eta.

        The gradient of a mini-batch is zero for weights outside of the batch. It has a factor eta, which for
        eta = k / T would make sigma fall like 1 / T; the theorem's sigma is a constant, so eta is divided out.
        """
        eta = 1e-6
        return self.deviation(eta) / eta

    def deviation(self, eta: float, draws: int = 4096) -> float:
        """The root of E ||g - E g||^2, g the stochastic weight gradient at the start with uniform weights."""
        ones = np.ones((draws, POOL))
        index, chosen = next(batches(np.random.default_rng([0, 1]), 1, draws))
        grads = np.zeros((draws, POOL))
        step = self.weight_step(np.tile(self.start, (draws, 1)), ones, index, chosen, eta)[0]
        np.put_along_axis(grads, index, step, axis=1)
        return float(np.sqrt(((grads - grads.mean(0)) ** 2).sum(1).mean()))

    @cached_property
    def _affine(self) -> tuple[Array, Array, Array, Array]:
        return *self.train.gradient(self.alpha), *self.val.gradient(self.alpha)

    def weight_step(
        self, theta: Array, weights: Array, index: NDArray[np.int64], chosen: NDArray[np.int64], eta: Any
    ) -> tuple[Array, Array]:
        """The gradient of a mini-batch's weights ``[..., m]``, and its tasks' meta-gradients ``[..., m, d]``.

        Training tasks ``index`` and validation tasks ``chosen``; ``theta [..., d]``, ``weights [..., M]``. This
        is `functional.weight_gradient` with one inner step.
        """
        p, q, pv, qv = self._affine
        m = index.shape[-1]
        weights = np.take_along_axis(weights, np.broadcast_to(index, (*weights.shape[:-1], m)), -1)
        grads = np.take_along_axis(_affine(p, q, theta), _like(index, theta), -2)
        ahead = theta - eta * (weights[..., None] * grads).mean(-2)
        v = np.take_along_axis(_affine(pv, qv, ahead), _like(chosen, theta), -2).mean(-2)
        return -(eta / m) * (grads @ v[..., None])[..., 0], grads

    def full_gradient(self, theta: Array, weights: Array, eta: Any) -> Array:
        """The theorem's gradient ``[..., M]``: all M weights, all N validation tasks."""
        p, q, pv, qv = self._affine
        grads = _affine(p, q, theta)
        ahead = theta - eta * (weights[..., None, :] @ grads)[..., 0, :] / POOL
        v = ahead @ pv.mean(0).T - qv.mean(0)
        return -(eta / POOL) * (grads @ v[..., None])[..., 0]

    def validation_loss(self, theta: Array) -> float:
        """The mean validation meta-loss over all N tasks, with its ridge term."""
        (a, b), x, y = self.val.support, self.val.query_x, self.val.query_y
        phi = theta - self.alpha * (a @ theta - b)
        error = (x @ phi[..., None])[..., 0] - y
        return float(((error**2).mean(1) + RIDGE * (phi**2).sum(1)).mean() / 2)


class Reference:
    """The same problem for `nestedmaml.functional`: a linear model, a loss with its L2 term, and batches.

    A loss sees predictions alone, so the model predicts sqrt(ridge) theta as well, and the loss has it shrink.
    """

    def __init__(self, problem: Problem) -> None:
        import torch
        from torch import nn

        class Ridge(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.theta = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                penalty = math.sqrt(RIDGE) * self.theta.expand(len(x), WIDTH)
                return torch.cat([(x @ self.theta)[:, None], penalty], 1)

        from nestedmaml.tasks.batch import TaskBatch

        def batch(tasks: Tasks) -> TaskBatch:
            parts = (tasks.support_x, tasks.support_y, tasks.query_x, tasks.query_y)
            return TaskBatch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))

        self.model, self.train, self.val, self.alpha = Ridge(), batch(problem.train), batch(problem.val), problem.alpha

    @staticmethod
    def loss(prediction: Any, target: Any) -> Any:
        """Half of the squared error plus ridge ||theta||^2, one value per instance."""
        return ((prediction[:, 0] - target).square() + prediction[:, 1:].square().sum(1)) / 2


def _normal_equations(x: Array, y: Array) -> tuple[Array, Array]:
    turned = np.swapaxes(x, 1, 2) / x.shape[1]
    return turned @ x + RIDGE * np.eye(WIDTH), (turned @ y[..., None])[..., 0]


def _losses(tasks: Tasks) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return tasks.support, tasks.query


def _unit(rng: np.random.Generator) -> Array:
    direction = rng.standard_normal(WIDTH)
    return direction / np.linalg.norm(direction)


def _affine(p: Array, q: Array, theta: Array) -> Array:
    """P theta - q for every task: ``[..., tasks, d]``, one matrix product."""
    return (theta @ p.reshape(-1, WIDTH).T).reshape(*theta.shape[:-1], *q.shape) - q


def _like(index: NDArray[np.int64], theta: Array) -> NDArray[np.int64]:
    """Indices ``[R, m]`` of tasks as `take_along_axis` wants them for ``[..., R, tasks, d]``."""
    return np.broadcast_to(index[..., None], (*theta.shape[:-1], index.shape[-1], 1))


def batches(rng: np.random.Generator, steps: int, runs: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Mini-batches without replacement, ``[runs, m]`` training and ``[runs, n]`` validation tasks."""
    for first in range(0, steps, 256):
        size = min(256, steps - first)
        index = rng.random((size, runs, POOL)).argsort(-1)[..., :BATCH]
        chosen = rng.random((size, runs, VALIDATION)).argsort(-1)[..., :VAL_BATCH]
        yield from zip(index, chosen, strict=True)
