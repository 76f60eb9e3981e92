"""Multimodal MAML (Vuorio, Sun, Hu and Lim, "Multimodal Model-Agnostic Meta-Learning via Task-Aware Modulation",
NeurIPS 2019).

An encoder reads a task's support set into an embedding v, and a modulator for each block turns v into tau, which
modulates that block's output: ``tau = (gamma, beta)`` scales and shifts it (FiLM), or ``tau = sigmoid(...)`` gates it.
The inner loop then descends on the prior theta with tau held fixed, as in the authors' Algorithm 1, and the query loss
trains prior, encoder and modulators together.

Scaling and shifting the output of a linear layer or a convolution is scaling the rows of its weight and bias, and
shifting its bias: modulating the prior. A normalisation behind a layer would undo that, so FiLM acts behind the
normalisation, as in the authors' networks.

To Alg, tau is one more group of parameters, which do not adapt. So the same adjoint that gives the gradient of the
prior gives that of tau, exactly and without unrolling, and one vector-Jacobian product of encoder and modulators
takes it the rest of the way.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from nestedmaml.adaptation import Adaptation, Params
from nestedmaml.functional import adapt
from nestedmaml.methods.method import (
    Figures,
    Method,
    State,
    _compiled,
    count,
    guarded,
    make_optimizer,
    meta_step,
    weighted_mean,
)
from nestedmaml.tasks.batch import TaskBatch

__all__ = ["MMAML"]

OWN = "mmaml."  # parameters of encoder and modulators, beside the model's own in state.params
PRIOR, TAU = "model.", "tau."  # the two groups of parameters of a modulated model
CHANNELS = (32, 32, 64, 64)  # of the convolutions that encode an image


@dataclass(kw_only=True)
class MMAML(Method):
    """MAML whose initialisation is modulated for each task by what an encoder sees in its support set.

    The encoder follows from the model. Where its first layer is linear, a bidirectional GRU reads the pairs (x, y) in
    the order of x (of its first coordinate), so that the order in which a set is given does not matter. Where it is a
    convolution, four strided convolutions read each image; its features, joined with its label, pass through a linear
    layer and are averaged over the set. Labels are one-hot, values as they are. The blocks are all linear layers and
    convolutions but the last.

    Args:
        order: 2 differentiates through the inner steps, 1 takes them as constants.
        modulation: "film": ``gamma * output + beta`` with gamma = 1 + a linear map of v, so that modulators at zero,
            where they start, are plain MAML; "sigmoid": ``sigmoid(tau) * output``.
        hidden: half the size of the task embedding v; units of the GRU in each direction.
    """

    order: Literal[1, 2] = 2
    modulation: Literal["film", "sigmoid"] = "film"
    hidden: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order!r}")
        if self.modulation not in ("film", "sigmoid"):
            raise ValueError(f"modulation must be 'film' or 'sigmoid', got {self.modulation!r}")
        count(self, "hidden", least=1)

    def init(self, model: nn.Module, params: Params) -> State:
        """The prior as the model has it; encoder and modulators drawn from ``seed``, unless they are given."""
        self.adaptation(model, params)
        like = next(iter(params.values()))
        for n, p in networks(model, self.modulation, self.hidden, self.seed).items():
            if n not in params:
                params[n] = p.to(like.device, like.dtype)
        return State(params, make_optimizer(self.optimizer, params.values(), self.meta_lr))

    def _shared_adaptation(self, model: nn.Module, params: Params, steps: int, order: int) -> Adaptation:
        inner = None if self.inner is None else tuple([self.inner] if isinstance(self.inner, str) else self.inner)
        rate = self.inner_lr
        if isinstance(rate, Mapping):
            rate = {PRIOR + n: value for n, value in rate.items()}
        spec, like = getattr(model, "spec", None), next(iter(params.values()))
        shared = self.compiler is not None and spec is not None and isinstance(self.inner_lr, (int, float))
        shared = shared and all(p.requires_grad for p in model.parameters())
        # as for the other methods, learners of one process share what was compiled for the same inner problem
        key = (json.dumps(spec), "mmaml", self.modulation, self.loss, str(rate), steps, order, inner, self.batching,
               str(like.device), str(like.dtype))  # fmt: skip
        if shared and key in _compiled:
            return _compiled[key]
        modulated = Modulated(model, film=self.modulation == "film").to(like.device, like.dtype)
        own = {PRIOR + n: params[n].detach() for n, _ in model.named_parameters()}
        alg = Adaptation(
            modulated, {**own, **modulated.neutral()}, loss=self.loss, lr=rate, steps=steps, order=order,
            inner=["model"] if inner is None else [PRIOR + n for n in inner],
            batching=self.batching, compiler=self.compiler,  # type: ignore[arg-type]
        )  # fmt: skip
        if shared:
            _compiled[key] = alg
        return alg

    def modulate(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """Modulate: tau of each task of a batch, from its support set ``x [m, S, ...]``, ``y [m, S, ...]``."""
        own = {n.removeprefix(OWN): p for n, p in params.items() if n.startswith(OWN)}
        v = encode(own, x, y)
        out = []
        for i in range(sum(n.startswith("modulator.") and n.endswith(".weight") for n in own)):
            raw = F.linear(v, own[f"modulator.{i}.weight"], own[f"modulator.{i}.bias"])
            if self.modulation == "film":
                gamma, beta = raw.chunk(2, -1)
                out += [1 + gamma, beta]
            else:
                out.append(raw.sigmoid())
        return out

    @torch.no_grad()
    def step(self, state: State, model: nn.Module, train: TaskBatch, val: TaskBatch | None = None, **_: Any) -> Figures:
        """One meta-step on the mean query loss."""
        alg = self.adaptation(model, state.params, order=self.order)
        theta, names = split(alg, state.params)
        own = {n: p.detach().requires_grad_() for n, p in state.params.items() if n.startswith(OWN)}
        like, m = next(iter(own.values())), len(train)
        with torch.enable_grad():
            tau = self.modulate(own, train.support_x, train.support_y)

        def task_gradient(theta: Params, *task: Tensor) -> tuple[Tensor, Params]:
            return alg.task_gradient({**theta, **dict(zip(names, task[6:], strict=True))}, *task[:6])

        support = torch.ones(train.support_x.shape[:2], dtype=like.dtype, device=like.device)
        query = torch.full(train.query_x.shape[:2], 1 / train.queries, dtype=like.dtype, device=like.device)
        losses, grads = alg.over_tasks(task_gradient, theta, train, support, query, *[t.detach() for t in tau])
        grads, sound, _length = guarded(grads)
        gradient = weighted_mean({n: grads[n] for n in theta}, sound.to(like.dtype))
        if gradient is not None:
            pulled = torch.autograd.grad(tau, list(own.values()), [grads[n] / m for n in names])
            gradient = {n.removeprefix(PRIOR): g for n, g in gradient.items()}
            meta_step(state, gradient | dict(zip(own, pulled, strict=True)))
        state.step += 1
        return {"train_loss": losses[sound].mean().item(), "diverged": float((~sound).sum())}

    @torch.no_grad()
    def predictions(self, state: State, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The outputs for the query instances of each task, after ``test_steps`` of adaptation."""
        alg = self.adaptation(model, state.params, steps=self.test_steps, order=1)
        theta, names = split(alg, state.params)
        tau = self.modulate(state.params, batch.support_x, batch.support_y)

        def query_predictions(theta: Params, *task: Tensor) -> Tensor:
            return alg.query_predictions({**theta, **dict(zip(names, task[5:], strict=True))}, *task[:5])

        support = torch.ones(batch.support_x.shape[:2], dtype=tau[0].dtype, device=tau[0].device)
        return alg.over_tasks(query_predictions, theta, batch, support, *tau)

    @torch.no_grad()
    def adapt(
        self, state: State, model: nn.Module, support_x: Tensor, support_y: Tensor, query_x: Tensor | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Params]:
        """The model adapted to one task, as a function of its inputs; its parameters, and tau under ``tau.``."""
        steps = self.inner_steps if self.test_steps is None else self.test_steps
        alg = self.adaptation(model, state.params, steps=steps, order=1)
        _, names = split(alg, state.params)
        tau = self.modulate(state.params, support_x[None], support_y[None])
        start = {PRIOR + n: state.params[n].detach() for n, _ in model.named_parameters()}
        start |= {n: t[0].detach() for n, t in zip(names, tau, strict=True)}
        phi = adapt(
            alg.model, start, support_x, support_y, loss=self.loss, lr=alg.lr, steps=steps, order=1, inner=alg.inner
        )
        return lambda x: functional_call(alg.model, phi, (x,)), {n.removeprefix(PRIOR): p for n, p in phi.items()}


def split(alg: Adaptation, params: Params) -> tuple[Params, list[str]]:
    """The trainable part of the prior, by its names in the modulated model, and the names of tau."""
    theta = {n: params[n.removeprefix(PRIOR)].detach() for n in alg.theta if n.startswith(PRIOR)}
    return theta, [n for n in alg.theta if n.startswith(TAU)]


# The modulated model ---------------------------------------------------------------------------------------------


class FiLM(nn.Module):
    """gamma and beta of one block, applied to its output; a gate has no beta."""

    def __init__(self, width: int, axis: int, film: bool) -> None:
        super().__init__()
        self.axis = axis
        self.gamma = nn.Parameter(torch.ones(width))
        if film:
            self.beta = nn.Parameter(torch.zeros(width))

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        shape = [1] * output.ndim
        shape[self.axis] = -1
        output = output * self.gamma.view(shape)
        return output + self.beta.view(shape) if hasattr(self, "beta") else output


class Modulated(nn.Module):
    """A copy of a model whose blocks are modulated; tau is its parameters ``tau.<block>``."""

    def __init__(self, model: nn.Module, *, film: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.tau = nn.ModuleList()
        for name, width, axis in blocks(model):
            part = FiLM(width, axis, film)
            self.model.get_submodule(name).register_forward_hook(part.hook)
            self.tau.append(part)

    def neutral(self) -> Params:
        """The tau that changes nothing."""
        return {TAU + n: p.detach() for n, p in self.tau.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        """The modulated model's outputs."""
        return self.model(x)


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers and convolutions, in the order in which the model has them."""
    return [(n, part) for n, part in model.named_modules() if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd))]


def blocks(model: nn.Module) -> list[tuple[str, int, int]]:
    """The modules whose outputs are modulated, with the size of their channels and the axis these are on.

    They are the layers but the last, or the normalisation of the same size that comes next after one.
    """
    found: dict[str, tuple[int, int]] = {}
    waiting: list[str] = []
    last = layers(model)[-1][0] if layers(model) else None
    for name, part in model.named_modules():
        if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd)):
            if name == last:
                continue
            found[name] = (part.out_features, -1) if isinstance(part, nn.Linear) else (part.out_channels, 1)
            waiting.append(name)
        elif (width := normalised(part)) is not None:
            behind = next((n for n in reversed(waiting) if found[n][0] == width), None)
            if behind is not None:
                waiting.remove(behind)
                del found[behind]
                found[name] = (width, -1 if isinstance(part, nn.LayerNorm) else 1)
    if not found:
        raise ValueError(
            f"MMAML modulates the linear layers and convolutions before the last, and {type(model).__name__} has none"
        )
    return [(n, width, axis) for n, (width, axis) in found.items()]


def normalised(part: nn.Module) -> int | None:
    """The number of channels of a normalisation."""
    if isinstance(part, nn.modules.batchnorm._NormBase):
        return part.num_features
    if isinstance(part, nn.GroupNorm):
        return part.num_channels
    if isinstance(part, nn.LayerNorm) and len(part.normalized_shape) == 1:
        return part.normalized_shape[0]
    return None


# The encoder -----------------------------------------------------------------------------------------------------


def networks(model: nn.Module, modulation: str, hidden: int, seed: int) -> Params:
    """Initial parameters of the encoder and of the modulators that fit a model."""
    parts = layers(model)
    first, last = parts[0][1], parts[-1][1]
    targets: Any = last.out_features if isinstance(last, nn.Linear) else last.out_channels
    built: dict[str, nn.Module] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(first, nn.Linear):
            built["encoder"] = nn.GRU(first.in_features + targets, hidden, bidirectional=True)
        elif isinstance(first, nn.Conv2d):
            sizes = (first.in_channels, *CHANNELS)
            for i in range(len(CHANNELS)):
                built[f"encoder.conv{i}"] = nn.Conv2d(sizes[i], sizes[i + 1], 3)
            built["encoder.set"] = nn.Linear(sizes[-1] + targets, 2 * hidden)
        else:
            raise ValueError(
                "MMAML encodes tasks of vectors or of images: the model's first layer must be Linear or Conv2d, "
                f"got {type(first).__name__}"
            )
        for i, (_, width, _) in enumerate(blocks(model)):
            built[f"modulator.{i}"] = part = nn.Linear(2 * hidden, 2 * width if modulation == "film" else width)
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    return {f"{OWN}{name}.{n}": p.detach() for name, part in built.items() for n, p in part.named_parameters()}


def encode(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The embedding v ``[m, 2 * hidden]`` of each task's support set."""
    return encode_points(own, x, y) if "encoder.weight_ih_l0" in own else encode_images(own, x, y)


def encode_points(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The last states, in both directions, of a GRU that reads the pairs (x, y) in the order of x."""
    weights = [own[f"encoder.{n}_l0{end}"] for end in ("", "_reverse")
               for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]  # fmt: skip
    x = x.flatten(2) if x.ndim > 2 else x[..., None]
    size, hidden = weights[0].shape[1], weights[1].shape[1]
    pairs = torch.cat([x.to(weights[0]), answers(y, size - x.shape[2]).to(weights[0])], 2)
    order = x[..., 0].argsort(1)
    pairs = pairs.gather(1, order[..., None].expand_as(pairs)).transpose(0, 1)
    state = pairs.new_zeros(2, len(x), hidden)
    with torch.backends.cudnn.flags(enabled=False):  # which wants all weights in one piece of memory
        _, v = torch.gru(pairs, state, weights, True, 1, 0.0, True, True, False)
    return torch.cat([v[0], v[1]], -1)


def encode_images(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean over the set of what a layer makes of each image's features and its label."""
    weight, bias = own["encoder.set.weight"], own["encoder.set.bias"]
    h = x.flatten(0, 1).to(weight)
    for i in range(len(CHANNELS)):
        h = F.conv2d(h, own[f"encoder.conv{i}.weight"], own[f"encoder.conv{i}.bias"], stride=2, padding=1)
        h = F.group_norm(h, 1).relu()
    h = h.mean((2, 3)).unflatten(0, x.shape[:2])
    h = torch.cat([h, answers(y, weight.shape[1] - h.shape[2]).to(h)], 2)
    return F.linear(h, weight, bias).relu().mean(1)


def answers(y: Tensor, size: int) -> Tensor:
    """Targets as ``size`` numbers an instance: classes one-hot, values as they are."""
    if not y.is_floating_point():
        top = int(y.max())
        if y.ndim != 2 or not 0 <= top < size or int(y.min()) < 0:
            raise ValueError(f"classes must be [m, S], from 0 to {size - 1}, got {list(y.shape)} with {top}")
        return F.one_hot(y, size)
    y = y.flatten(2) if y.ndim > 2 else y[..., None]
    if y.shape[2] != size:
        raise ValueError(f"MMAML's encoder was built for {size} values an instance, got {y.shape[2]}")
    return y
