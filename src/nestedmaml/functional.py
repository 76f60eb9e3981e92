"""The mathematics of NestedMAML, as pure functions of parameters, tasks and weights.

The paper's symbols: ``params`` is theta, ``lr`` is alpha, ``adapt`` is Alg(theta, S), ``weights`` are w,
``meta_lr`` is eta. One task adapts by ``steps`` steps of gradient descent on its support loss,

    theta_{t+1} = theta_t - alpha * grad L_S(theta_t),        theta_0 = theta,    phi = theta_s,

whose Jacobian is a product of J_t = I - alpha H_t, with H_t the Hessian of the support loss at theta_t. So

- the exact meta-gradient *pulls* the query gradient back: v <- v - alpha H_t v, for t = s-1 ... 0 (the adjoint);
- the derivative of K query losses along a direction *pushes* it forward: d <- d - alpha H_t d, t = 0 ... s-1.

Both need only the path theta_0 ... theta_s and one Hessian-vector product at a time: the memory of one
step, whatever their number. What is unrolled nowhere here is the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestedmaml.tasks.batch import TaskBatch

__all__ = ["adapt", "meta_gradient", "query_losses", "weight_gradient"]

Params = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Rate = float | Mapping[str, float | Tensor]
Batching = Literal["auto", "vmap", "loop"]


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
# One task: the adaptation, its adjoint and its tangent
# ---------------------------------------------------------------------------------------------------------


class Adaptation:
    """Alg, eq. ``param-adaptation``: a model, a loss and inner steps, with Alg's Jacobian in both directions.

    ``theta`` holds the trainable parameters (given, and not frozen in the module), ``held`` all others. The
    methods take theta as their first argument, so that one adaptation serves all of a run's iterations.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        *,
        loss: Loss,
        lr: Rate,
        steps: int,
        order: int = 2,
        inner: Iterable[str] | None = None,
        batching: Batching = "auto",
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        own = dict(model.named_parameters())
        unknown = [name for name in params if name not in own]
        if unknown or not params:
            raise ValueError(f"params must name parameters of the model, got {unknown or 'none'}; it has {list(own)}")
        for name, value in params.items():
            if value.shape != own[name].shape:
                raise ValueError(f"{name} must be {list(own[name].shape)}, got {list(value.shape)}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the number of inner steps must be an integer >= 0, got {steps!r}")
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        refuse_unusable(model)
        self.model, self.loss, self.steps, self.order = model, loss, steps, order
        self.theta: Params = {n: p for n, p in params.items() if own[n].requires_grad}
        if not self.theta:
            raise ValueError("no parameter can be trained: every one that was given has requires_grad=False")
        self.held: Params = {n: params.get(n, p).detach() for n, p in own.items() if n not in self.theta}
        self.inner = inner_names(self.theta, own, inner)
        self.lr = _rates(lr, self.inner)
        self.batching = resolve_batching(batching, model, next(iter(self.theta.values())).device)
        self.compiler = compiler
        self._mapped: dict[Any, Callable[..., Any]] = {}

    def complete(self, params: Mapping[str, Tensor], grads: Params) -> Params:
        """``grads`` with every key of ``params``: zeros where frozen."""
        return {n: grads[n] if n in grads else torch.zeros_like(p) for n, p in params.items()}

    def values(self, theta: Params, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each instance, ``[n]``."""
        values = self.loss(functional_call(self.model, {**self.held, **theta}, (x,)), y)
        if values.shape != x.shape[:1]:
            raise ValueError(
                f"the loss must return one value per instance, unreduced: {list(x.shape[:1])}, "
                f"got {list(values.shape)}; use reduction='none'"
            )
        return values

    def support_loss(self, theta: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The (weighted) mean of the support losses, L-hat."""
        return (weights * self.values(theta, x, y)).sum() / len(weights)

    def support_gradient(self, theta: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
        """The gradient of the support loss in the parameters that adapt."""
        return grad(lambda part: self.support_loss({**theta, **part}, x, y, weights))({n: theta[n] for n in self.inner})

    def path(self, theta: Params, x: Tensor, y: Tensor, weights: Tensor) -> list[Params]:
        """theta_0 ... theta_s."""
        path = [theta]
        for _ in range(self.steps):
            g = self.support_gradient(theta, x, y, weights)
            if self.order == 1:
                g = {n: value.detach() for n, value in g.items()}
            theta = {**theta, **{n: theta[n] - self.lr[n] * g[n] for n in self.inner}}
            path.append(theta)
        return path

    def pull(self, path: list[Params], v: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
        """The adjoint: the transposed Jacobian of Alg times ``v``. The identity at order 1."""
        if self.order == 1:
            return v
        for theta in reversed(path[:-1]):
            u = {n: self.lr[n] * v[n] for n in self.inner}
            hv = grad(lambda at, u=u: _dot(self.support_gradient(at, x, y, weights), u))(theta)
            v = {n: v[n] - hv[n] for n in v}
        return v

    def push(self, path: list[Params], d: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
        """The tangent: the Jacobian of Alg times ``d``. The identity at order 1."""
        if self.order == 1:
            return d

        def slope(part: Params, theta: Params, d: Params) -> Tensor:
            return _dot(grad(self.support_loss)({**theta, **part}, x, y, weights), d)

        for theta in path[:-1]:
            hd = grad(slope)({n: theta[n] for n in self.inner}, theta, d)
            d = {**d, **{n: d[n] - self.lr[n] * hd[n] for n in self.inner}}
        return d

    # Each of the following is one task's share of a batch; ``over_tasks`` maps it.

    def query_values(self, theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, support: Tensor) -> Tensor:
        """The query losses ``[K]`` after adaptation."""
        return self.values(self.path(theta, sx, sy, support)[-1], qx, qy)

    def query_predictions(
        self, theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, support: Tensor
    ) -> Tensor:
        """The model's outputs for the query instances after adaptation."""
        phi = self.path(theta, sx, sy, support)[-1]
        return functional_call(self.model, {**self.held, **phi}, (qx,))

    def task_gradient(
        self, theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, support: Tensor, query: Tensor
    ) -> tuple[Tensor, Params]:
        """The query losses ``[K]`` and the gradient at theta of their sum weighted by ``query``."""
        path = self.path(theta, sx, sy, support)

        def weighted(phi: Params) -> tuple[Tensor, Tensor]:
            values = self.values(phi, qx, qy)
            return (query * values).sum(), values

        v, values = grad(weighted, has_aux=True)(path[-1])
        return values, self.pull(path, v, sx, sy, support)

    def query_slope(
        self, theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, support: Tensor, *direction: Tensor
    ) -> Tensor:
        """The derivative of each query loss ``[K]`` along ``direction`` (tensors in theta's order) at theta.

        The last factor differentiates a gradient: J d is the gradient in u of <J'u, d>. That asks no more of the
        model than the Hessian does, while forward mode is missing for some layers.
        """
        path = self.path(theta, sx, sy, support)
        d = self.push(path, dict(zip(theta, direction, strict=True)), sx, sy, support)

        def slope(u: Tensor) -> Tensor:
            return _dot(grad(lambda phi: (u * self.values(phi, qx, qy)).sum())(path[-1]), d)

        return grad(slope)(torch.ones(len(qx), dtype=direction[0].dtype, device=qx.device))

    def over_tasks(
        self, one: Callable[..., Any], theta: Params, batch: TaskBatch, *per_task: Tensor, shared: Iterable[Tensor] = ()
    ) -> Any:
        """``one`` for every task of a batch, its results stacked; ``per_task`` is split, ``shared`` is not."""
        self.refuse_changing_buffers(batch.support_x[0])
        tasks = (batch.support_x, batch.support_y, batch.query_x, batch.query_y, *per_task)
        shared = tuple(shared)
        key = (one.__name__, len(tasks), len(shared))
        if key not in self._mapped:
            compiler = self.compiler if one.__name__ in ("task_gradient", "query_slope") else None
            if self.batching == "vmap":
                mapped = vmap(one, in_dims=(None,) + (0,) * len(tasks) + (None,) * len(shared))
                self._mapped[key] = compiler(mapped) if compiler else mapped
            else:
                self._mapped[key] = _looped(compiler(one) if compiler else one, len(tasks))
        return self._mapped[key](theta, *tasks, *shared)

    def refuse_changing_buffers(self, x: Tensor) -> None:
        """Run the model once, the first time it is seen in this mode, and refuse it if it writes to a buffer."""
        mode = tuple(layer.training for layer in self.model.modules())
        if _probed.get(self.model) == mode:
            return
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        own = dict(self.model.named_buffers())
        versions = {n: b._version for n, b in buffers.items()}
        if buffers:
            watched = dict(buffers)
            with torch.no_grad():
                functional_call(_Watch(self.model, watched), {
                    f"model.{n}": value for n, value in {**self.held, **self.theta, **buffers}.items()
                }, (x,))  # fmt: skip
            for n, b in buffers.items():
                if (
                    b._version != versions[n]
                    or watched[n] is not b
                    or dict(self.model.named_buffers())[n] is not own[n]
                ):
                    owner = n.rpartition(".")[0]
                    kind = type(self.model.get_submodule(owner)).__name__
                    raise ValueError(
                        f"layer {owner!r} ({kind}) writes to its buffer {n!r} while it runs, which a meta-gradient "
                        "cannot pass: put that layer in eval mode, or take the buffer out"
                    )
        _probed[self.model] = mode


class _Watch(nn.Module):
    """Runs a model, and notes which tensors are its buffers when it is done."""

    def __init__(self, model: nn.Module, found: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.found = model, found

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        self.found.update(self.model.named_buffers())
        return out


_probed: WeakKeyDictionary[nn.Module, tuple[bool, ...]] = WeakKeyDictionary()


def _looped(one: Callable[..., Any], split: int) -> Callable[..., Any]:
    def mapped(theta: Params, *args: Any) -> Any:
        shared = args[split:]
        return _stacked([one(theta, *task, *shared) for task in zip(*args[:split], strict=True)])

    return mapped


def _stacked(results: list[Any]) -> Any:
    """A list of equal trees of tensors as one tree of stacked tensors."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(results)
    if isinstance(first, dict):
        return {key: torch.stack([r[key] for r in results]) for key in first}
    return tuple(_stacked(list(parts)) for parts in zip(*results, strict=True))


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
# Choices and checks
# ---------------------------------------------------------------------------------------------------------


def resolve_batching(batching: Batching, model: nn.Module, device: torch.device) -> Literal["vmap", "loop"]:
    """How tasks are batched: looped where they go through convolutions on a CPU, vectorised everywhere else.

    Under vmap such tasks become one grouped convolution, which is several times slower there.
    """
    if batching == "auto":
        convolutional = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.modules())
        return "loop" if convolutional and device.type == "cpu" else "vmap"
    if batching not in ("vmap", "loop"):
        raise ValueError(f"batching must be 'auto', 'vmap' or 'loop', got {batching!r}")
    return batching


def inner_names(theta: Mapping[str, Tensor], own: Mapping[str, Tensor], inner: Iterable[str] | None) -> list[str]:
    """The trainable parameters that ``inner`` names, by full name or by the name of their module."""
    if inner is None:
        return list(theta)
    chosen = [inner] if isinstance(inner, str) else list(inner)

    def named(parameter: str, name: str) -> bool:
        return parameter == name or parameter.startswith(f"{name}.")

    for name in chosen:
        if not any(named(parameter, name) for parameter in own):
            raise ValueError(f"inner names {name!r}, which the model does not have; it has {list(own)}")
    names = [parameter for parameter in theta if any(named(parameter, name) for name in chosen)]
    if not names:
        raise ValueError(f"inner names no parameter that can be trained, got {chosen}; there are {list(theta)}")
    return names


def refuse_unusable(model: nn.Module) -> None:
    """Raise for layers known to change themselves, or to draw random numbers, while they run."""
    for name, layer in model.named_modules():
        if not layer.training:
            continue
        where = f"layer {name!r} ({type(layer).__name__})" if name else f"the model ({type(layer).__name__})"
        if getattr(layer, "track_running_stats", False) and getattr(layer, "running_mean", None) is not None:
            raise ValueError(
                f"{where} updates its running statistics in place, which a meta-gradient cannot pass: "
                "use nestedmaml.models.prepare(model), or build it with track_running_stats=False"
            )
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ValueError(
                f"{where} draws random numbers, so that its gradients are not defined: switch it off with "
                "model.eval() or p=0"
            )


def check_weights(weights: Tensor, batch: TaskBatch) -> None:
    """Raise unless ``weights`` are finite numbers, one per task or one per query instance."""
    m, k = len(batch), batch.queries
    if tuple(weights.shape) not in ((m,), (m, k)):
        raise ValueError(f"weights must be [m] = [{m}] or [m, K] = [{m}, {k}], got {list(weights.shape)}")
    if not weights.is_floating_point():
        raise TypeError(f"weights must be real numbers, got {weights.dtype}")
    if not bool(weights.isfinite().all()):
        raise ValueError("weights must be finite, got NaN or infinity")


def _rates(lr: Rate, inner: list[str]) -> dict[str, float | Tensor]:
    if isinstance(lr, Mapping):
        missing = [n for n in inner if n not in lr]
        if missing:
            raise ValueError(f"lr has no rate for {missing}; it has {list(lr)}")
        rates: dict[str, float | Tensor] = {n: lr[n] for n in inner}
    else:
        rates = dict.fromkeys(inner, lr)
    for n, rate in rates.items():
        if isinstance(rate, Tensor):
            continue  # learned rates may have any sign
        if not math.isfinite(rate) or rate < 0:
            raise ValueError(f"the inner learning rate must be a number >= 0, got {rate} for {n}")
    return rates


def _support_weights(weights: Tensor | None, theta: Params, support_x: Tensor, shape: torch.Size) -> Tensor:
    if weights is None:
        return torch.ones(shape, dtype=_real(theta), device=support_x.device)
    if weights.shape != shape:
        raise ValueError(f"support_weights must be {list(shape)}, got {list(weights.shape)}")
    return weights


def _real(theta: Params) -> torch.dtype:
    return next(iter(theta.values())).dtype


def _dot(a: Params, b: Params) -> Tensor:
    """<a, b> over the keys of ``b``."""
    return torch.stack([(a[n] * b[n]).sum() for n in b]).sum()
