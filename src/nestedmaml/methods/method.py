"""What the methods share: their options, their state, the meta-step, and the guard against diverging tasks."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nestedmaml.adaptation import Adaptation, Loss, Params, Rate, resolve_batching
from nestedmaml.functional import adapt, combine, task_gradients
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting import Knowledge, Rule
from nestedmaml.weighting.rule import State as RuleState

__all__ = ["Method", "State"]

log = logging.getLogger("nestedmaml")

Figures = dict[str, float]


@dataclass
class State:
    """All that a run changes: saving this, and starting from it, is resuming."""

    params: Params
    optimizer: torch.optim.Optimizer
    step: int = 0
    rule: RuleState | None = None
    average: Params | None = None
    """Running average of the validation gradient, where one is asked for."""
    loudness: float = 0.0
    """Running median of the norms of tasks' gradients: validation tasks' where a method has them."""


@dataclass(kw_only=True)
class Method:
    """A method's options. A subclass adds its own, and ``step``.

    Args:
        loss: one value per instance, unreduced.
        inner_lr: alpha, a number or a dict of numbers or tensors like the parameters.
        inner_steps: steps of gradient descent on a support set while training.
        test_steps: the same when adapting to new tasks; None is ``inner_steps``.
        meta_lr: eta, the step size of the meta-optimizer.
        optimizer: of the meta-step: "adam", "sgd", or any class of torch.optim that works from gradients alone.
        inner: names of the parameters (or modules) that adapt; None is all.
        batching: how tasks are batched: "vmap", "loop", or "auto", which follows the model and the device.
        seed: of everything the method draws.
    """

    loss: Loss
    inner_lr: Rate = 0.01
    inner_steps: int = 5
    test_steps: int | None = None
    meta_lr: float = 1e-3
    optimizer: str | type[torch.optim.Optimizer] = "adam"
    inner: Iterable[str] | None = None
    batching: str = "auto"
    seed: int = 0

    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = field(default=None, init=False, repr=False)
    _algs: dict[Any, Adaptation] = field(default_factory=dict, init=False, repr=False)

    needs_truth: ClassVar[bool] = False
    needs_val: ClassVar[bool] = False
    pretrains: ClassVar[bool] = False
    """Whether ``step`` takes single instances with global classes, ``(x, y)``, instead of tasks."""
    weighting: Rule | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        positive(self, "meta_lr")
        for name in ("inner_steps", "test_steps"):
            count(self, name)
        if not callable(self.loss):
            raise TypeError(f"loss must be a function of (prediction, target), got {self.loss!r}")

    def init(self, model: nn.Module, params: Params) -> State:
        """The state before the first step."""
        # built once here, so that whatever cannot work is refused before anything is trained
        self.adaptation(model, params)
        return State(params, make_optimizer(self.optimizer, params.values(), self.meta_lr))

    def meet(self, state: State, model: nn.Module, source: Any) -> State:
        """The state for a source that ``fit`` was given, before anything is trained or read from disk."""
        return state

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
        """One iteration: changes ``state``, returns what there is to say of it."""
        raise NotImplementedError

    def adaptation(self, model: nn.Module, params: Params, *, steps: int | None = None, order: int = 2) -> Adaptation:
        """Alg with this method's options, built once for each number of steps and order."""
        steps = self.inner_steps if steps is None else steps
        key = (id(model), steps, order)
        if key not in self._algs:
            self._algs[key] = self._shared_adaptation(model, params, steps, order)
        return self._algs[key]

    def _shared_adaptation(self, model: nn.Module, params: Params, steps: int, order: int) -> Adaptation:
        options: dict[str, Any] = {
            "loss": self.loss, "lr": self.inner_lr, "steps": steps, "order": order, "inner": self.inner,
            "batching": self.batching, "compiler": self.compiler,
        }  # fmt: skip
        spec, inner = getattr(model, "spec", None), self.inner if self.inner is None else tuple(self.inner)
        plain = isinstance(self.inner_lr, (int, float)) and all(p.requires_grad for p in model.parameters())
        if spec is None or not plain or self.compiler is None:
            return Adaptation(model, params, **options)
        # learners of one process share what was compiled for the same built-in model and the same inner problem
        device = str(next(iter(params.values())).device)
        key = (json.dumps(spec), self.loss, self.inner_lr, steps, order, inner, self.batching, device)
        if key not in _compiled:
            _compiled[key] = Adaptation(copy.deepcopy(model), params, **options)
        return _compiled[key]

    @torch.no_grad()
    def predictions(self, state: State, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The outputs for the query instances of each task, after ``test_steps`` of adaptation."""
        alg = self.adaptation(model, state.params, steps=self.test_steps, order=1)
        support = torch.ones(batch.support_x.shape[:2], device=batch.support_x.device)
        return alg.over_tasks(alg.query_predictions, trainable(alg, state.params), batch, support)

    @torch.no_grad()
    def adapt(
        self, state: State, model: nn.Module, support_x: Tensor, support_y: Tensor, query_x: Tensor | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Params]:
        """The model adapted to one task, as a function of its inputs, and its parameters."""
        steps = self.inner_steps if self.test_steps is None else self.test_steps
        params = adapt(
            model, {n: p.detach() for n, p in state.params.items()}, support_x, support_y,
            loss=self.loss, lr=self.inner_lr, steps=steps, order=1, inner=self.inner,
        )  # fmt: skip
        return lambda x: functional_call(model, params, (x,)), params

    def use_compiler(self, model: nn.Module, params: Params, *, forced: bool) -> None:
        """Compile the gradients of vectorised tasks, where this machine can."""
        kernels = compiled(self, model, params, forced=forced)
        if kernels is not None:
            self.compiler = kernels
            self.forget()

    def forget(self) -> None:
        """Build the adaptations anew when they are next asked for."""
        self._algs.clear()


_compiled: dict[Any, Adaptation] = {}


def trainable(alg: Adaptation, params: Params) -> Params:
    """The parameters that learn, without the flags an optimizer may have left on them."""
    return {n: params[n].detach() for n in alg.theta}


def norms(grads: Params) -> Tensor:
    """The norm of each task's gradient, ``[m]``."""
    return torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()


def guarded(grads: Params, limit: float = math.inf) -> tuple[Params, Tensor, Tensor]:
    """``grads`` with zeros for tasks that diverged, which tasks did not, and the norms.

    A task whose inner loop diverges has a gradient that is infinite, or finite and absurd; either would poison the
    parameters, or the optimizer's moments, for good.
    """
    length = norms(grads)
    sound = length.isfinite() & (length <= limit)
    if not bool(sound.all()):
        grads = {n: g.masked_fill(~sound.view(-1, *[1] * (g.ndim - 1)), 0) for n, g in grads.items()}
    return grads, sound, length


def typical_norm(grads: Params) -> float:
    """The median norm of the tasks' gradients, of those that are finite; infinity where none is."""
    length = norms(grads)
    length = length[length.isfinite()]
    return length.median().item() if len(length) else math.inf


def validation_gradient(state: State, alg: Adaptation, theta: Params, val: TaskBatch) -> tuple[Params, float, float]:
    """The mean gradient of the validation meta-loss at ``theta``, its loss, and how many tasks diverged."""
    losses, grads = task_gradients(alg, theta, val)
    grads, sound, length = guarded(grads)
    kept = int(sound.sum())
    if kept:
        loud = length[sound].median().item()
        state.loudness = 0.95 * state.loudness + 0.05 * loud if state.loudness else loud
    mean_loss = losses[sound].mean().item() if kept else math.nan
    return {n: g.sum(0) / max(kept, 1) for n, g in grads.items()}, mean_loss, float(len(val) - kept)


def meta_step(state: State, gradient: Params) -> None:
    """Let the optimizer take the step, eq. ``model-update``."""
    for n, g in gradient.items():
        state.params[n].grad = g.to(state.params[n].dtype)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def weighted_mean(grads: Params, weights: Tensor) -> Params | None:
    """(1/m) sum of w_i g_i, or None where every weight is zero, when there is no step to make."""
    return combine(grads, weights) if bool((weights != 0).any()) else None


def make_optimizer(
    optimizer: str | type[torch.optim.Optimizer], params: Iterable[Tensor], lr: float
) -> torch.optim.Optimizer:
    """A torch optimizer by name or class, without those that want more than gradients."""
    known = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type)}
    kind = known.get(optimizer.lower()) if isinstance(optimizer, str) else optimizer
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        raise ValueError(f"optimizer must be the name or class of a torch optimizer, got {optimizer!r}")
    if kind.__name__ in ("LBFGS", "SparseAdam"):
        raise ValueError(f"{kind.__name__} does not work from dense gradients alone: use adam, sgd or the like")
    return kind(list(params), lr=lr)  # type: ignore[call-arg]


def compiled(
    method: Method, model: nn.Module, params: Params, *, forced: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """torch.compile for fixed shapes, or None where it would not work or not pay."""
    device = next(iter(params.values())).device
    vectorised = resolve_batching(method.batching, model, device) == "vmap"  # type: ignore[arg-type]
    if not forced and not vectorised:
        return None
    if device.type == "cpu" and not any(
        shutil.which(name) for name in ("g++", "clang++", os.environ.get("CXX", "g++"))
    ):
        log.warning("not compiled, since there is no C++ compiler; runs are several times slower without")
        return None
    return partial(torch.compile, dynamic=False)


def positive(options: object, *names: str) -> None:
    """Raise unless the named options are numbers above zero (or None)."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a number > 0, got {value!r}")


def count(options: object, *names: str, least: int = 0) -> None:
    """Raise unless the named options are integers (or None), at least ``least``."""
    for name in names:
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
