"""Alg, eq. ``param-adaptation``: how one task adapts, with the Jacobian of that in both directions.

One task adapts by ``steps`` steps of gradient descent on its support loss,

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

__all__ = ["Adaptation", "Batching", "Loss", "Params", "Rate", "resolve_batching"]

Params = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Rate = float | Mapping[str, float | Tensor]
Batching = Literal["auto", "vmap", "loop"]


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
        copies = {n: b.clone() for n, b in self.model.named_buffers()}
        if copies:
            versions = {n: b._version for n, b in copies.items()}
            watch = _Watch(self.model)
            given = {f"model.{n}": value for n, value in {**self.held, **self.theta, **copies}.items()}
            with torch.no_grad():
                functional_call(watch, given, (x,))
            for n, b in copies.items():  # written in place, or replaced
                if b._version != versions[n] or watch.left[n] is not b:
                    owner = n.rpartition(".")[0]
                    kind = type(self.model.get_submodule(owner)).__name__
                    raise ValueError(
                        f"layer {owner!r} ({kind}) writes to its buffer {n!r} while it runs, which a meta-gradient "
                        "cannot pass: put that layer in eval mode, or take the buffer out"
                    )
        _probed[self.model] = mode


class _Watch(nn.Module):
    """Runs a model, and notes which buffers that left it with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.left: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        self.left = dict(self.model.named_buffers())
        return out


_probed: WeakKeyDictionary[nn.Module, tuple[bool, ...]] = WeakKeyDictionary()


def _looped(one: Callable[..., Any], split: int) -> Callable[..., Any]:
    def mapped(theta: Params, *args: Any) -> Any:
        shared = args[split:]
        return stacked([one(theta, *task, *shared) for task in zip(*args[:split], strict=True)])

    return mapped


def stacked(results: list[Any]) -> Any:
    """A list of equal trees of tensors as one tree of stacked tensors."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(results)
    if isinstance(first, dict):
        return {key: torch.stack([r[key] for r in results]) for key in first}
    return tuple(stacked(list(parts)) for parts in zip(*results, strict=True))


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


def _dot(a: Params, b: Params) -> Tensor:
    """<a, b> over the keys of ``b``."""
    return torch.stack([(a[n] * b[n]).sum() for n in b]).sum()
