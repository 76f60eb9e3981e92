"""Bayesian TAML (Lee, Lee, Na, Kim, Park, Yang and Hwang, "Learning to Balance", ICLR 2020).

An encoder looks at the support set and infers three variables that say how a task should be learned:

- z moves the initial parameters, channel by channel: weights by (1 + z), biases by + z;
- omega, one per class, multiplies that class's support losses: a softmax over the classes times their number;
- gamma, one per layer, multiplies that layer's inner step size by exp(gamma).

All three are Gaussian under the posterior q and standard normal under the prior. The meta-objective is the mean query
loss plus KL(q || prior) / (S + K); predictions average over draws from q.

The inner step size is MAML's, fixed; the authors' runs also learn one for each parameter (Meta-SGD),
for which ``inner_lr`` takes a dict of tensors but does not train them.

The encoder is a set of sets: the instances of a class are pooled to the class, the classes to the task, both by
statistics: mean, variance, skewness, kurtosis, and the set's size. As in the authors' code, z leaves a classifier's
last layer alone (its rows belong to no class in particular); since normalisation undoes a scaling before it, z
scales and shifts normalisation layers too. In regression the support set, pairs (x, y), is one class: omega is one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestedmaml.adaptation import Adaptation, Params, stacked
from nestedmaml.functional import combine
from nestedmaml.losses import cross_entropy
from nestedmaml.methods.method import Figures, Method, State, count, guarded, make_optimizer, meta_step, positive
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.tasks.counter import bits
from nestedmaml.weighting import Knowledge

__all__ = ["BTAML"]

log = logging.getLogger("nestedmaml")

PREFIX = "btaml."  # of the encoder's parameters among those of the model
Posterior = dict[str, tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class BTAML(Method):
    """MAML whose initial parameters, class weights and step sizes follow from the support set, with uncertainty.

    Args:
        use_z: infer z, which relocates the initial parameters.
        use_omega: infer omega, the classes' shares in the support loss (classification only).
        use_gamma: infer gamma, the layers' step sizes. With all three off this is MAML.
        kl_weight: factor of the KL term. None is the paper's 1 for classes. A squared error is a Gaussian's negative
            log-likelihood times twice its variance, and so is the KL beside it: None is 0.02 there, noise of 0.1.
        mc_samples: draws from the posterior that a prediction averages over; 0 takes the posterior's mean.
        order: 2, or 1: the support gradients do not depend on the parameters (but still on omega).
        width: features of an instance in the encoder.
        initial_sd: standard deviation of the posteriors before training (0.69 in the authors' code).
        classes: whether targets are classes; None: whether the loss is ``nestedmaml.losses.cross_entropy``.
    """

    use_z: bool = True
    use_omega: bool = True
    use_gamma: bool = True
    kl_weight: float | None = None
    mc_samples: int = 10
    order: Literal[1, 2] = 2
    width: int = 64
    initial_sd: float = 0.1
    classes: bool | None = None

    encoder: Encoder | None = field(default=None, init=False, repr=False)
    _mapped: dict[Any, Callable[..., Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "initial_sd")
        count(self, "mc_samples")
        count(self, "width", least=2)
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order!r}")
        if self.kl_weight is not None and not (math.isfinite(self.kl_weight) and self.kl_weight >= 0):
            raise ValueError(f"kl_weight must be a number >= 0, got {self.kl_weight!r}")

    def init(self, model: nn.Module, params: Params) -> State:
        """The model's parameters and the encoder's."""
        alg = self.adaptation(model, params)
        classes = self.loss is cross_entropy if self.classes is None else self.classes
        use = {"z": self.use_z, "omega": self.use_omega and classes, "gamma": self.use_gamma}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(bits(self.seed, "btaml/encoder")) >> 1)
            encoder = Encoder(model, alg, use, classes=classes, width=self.width, initial_sd=self.initial_sd)
        like = next(iter(alg.theta.values()))
        self.encoder = encoder.to(like.device, like.dtype)
        own = {n: params[n] for n, _ in model.named_parameters()}
        own |= {PREFIX + n: p.detach().clone() for n, p in encoder.named_parameters()}
        return State(own, make_optimizer(self.optimizer, own.values(), self.meta_lr))

    def adaptation(self, model: nn.Module, params: Params, *, steps: int | None = None, order: int = 2) -> Adaptation:
        """Alg of the model's parameters alone."""
        own = {n: p for n, p in params.items() if not n.startswith(PREFIX)}
        return super().adaptation(model, own, steps=steps, order=order)

    def use_compiler(self, model: nn.Module, params: Params, *, forced: bool) -> None:
        """Not compiled: unrolled, with the encoder in it, the gradient takes minutes to compile."""
        if forced:
            log.warning("BTAML is not compiled: its unrolled gradient takes minutes to compile")

    def forget(self) -> None:
        """Build the adaptations and what maps them anew."""
        super().forget()
        self._mapped.clear()

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
        truth: Any = None,
    ) -> Figures:
        """One meta-step on the mean query loss and the KL term, with one draw for each task."""
        alg = self.adaptation(model, state.params, order=self.order)
        noise = self.noise(len(train), "train", state.step, next(iter(alg.theta.values())))
        (losses, kl), grads = self.gradients(alg, state.params, train, noise)
        grads, sound, _ = guarded(grads)
        if bool(sound.any()):
            meta_step(state, combine(grads, sound.to(losses.dtype)))
        state.step += 1
        return {
            "train_loss": losses[sound].mean().item(),
            "kl": kl[sound].mean().item(),
            "diverged": float((~sound).sum()),
        }

    def gradients(
        self, alg: Adaptation, params: Params, batch: TaskBatch, noise: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Params]:
        """Per task: the query losses and the KL, and the gradient of the objective in all that learns."""
        kl_weight = self.kl_weight
        if kl_weight is None:
            kl_weight = 1.0 if self._built().classes else 0.02
        kl_weight = kl_weight / (batch.shots + batch.queries)

        def objective(
            params: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor, noise: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            phi, kl, _ = self.adapted(alg, params, sx, sy, noise)
            values = alg.values(phi, qx, qy)
            return values.mean() + kl_weight * kl, (values, kl)

        def one(params: Params, *task: Tensor) -> tuple[Tensor, Tensor, Params]:
            grads, (values, kl) = grad(objective, has_aux=True)(params, *task)
            return values, kl, grads

        alg.refuse_changing_buffers(batch.support_x[0])
        learning = {n: p.detach() for n, p in params.items() if n in alg.theta or n.startswith(PREFIX)}
        tasks = (batch.support_x, batch.support_y, batch.query_x, batch.query_y, noise)
        values, kl, grads = self.over_tasks(("gradients", kl_weight), one, alg, learning, *tasks)
        return (values, kl), grads

    def adapted(
        self, alg: Adaptation, params: Params, sx: Tensor, sy: Tensor, noise: Tensor
    ) -> tuple[Params, Tensor, Params]:
        """One task, for one draw of z, omega and gamma: adapted parameters, the KL, and where adaptation began."""
        theta = {n: p for n, p in params.items() if n in alg.theta}
        rates, weights = alg.lr, torch.ones(len(sx), dtype=noise.dtype, device=sx.device)
        kl = noise.new_zeros(())
        encoder = self._built()
        if encoder.draws:
            own = {n.removeprefix(PREFIX): p for n, p in params.items() if n.startswith(PREFIX)}
            q: Posterior = functional_call(encoder, own, (sx, sy))
            drawn = encoder.draw(q, noise)
            kl = divergence(q)
            theta, rates, weights = encoder.balance(theta, alg.lr, drawn, sy)
        start = theta
        for _ in range(alg.steps):
            at = theta if alg.order == 2 else {n: p.detach() for n, p in theta.items()}
            g = alg.support_gradient(at, sx, sy, weights)
            theta = {**theta, **{n: theta[n] - rates[n] * g[n] for n in alg.inner}}
        return theta, kl, start

    @torch.no_grad()
    def predictions(self, state: State, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The mean over draws: of outputs, or of probabilities, whose logarithm is returned."""
        # with no_grad the inner steps are the same at either order
        alg = self.adaptation(model, state.params, steps=self.test_steps, order=1)

        def one(params: Params, sx: Tensor, sy: Tensor, qx: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            phi, _, start = self.adapted(alg, params, sx, sy, noise)
            return functional_call(model, {**alg.held, **phi}, (qx,)), converges(alg, start, phi, sx, sy)

        alg.refuse_changing_buffers(batch.support_x[0])
        params = {n: p.detach() for n, p in state.params.items()}
        noise = self.test_noise(next(iter(params.values())))
        tasks = (batch.support_x, batch.support_y, batch.query_x)
        outputs, sound = zip(
            *(
                self.over_tasks(("predictions",), one, alg, params, *tasks, draw.expand(len(batch), -1))
                for draw in noise
            ),
            strict=True,
        )
        return self.average(torch.stack(outputs), torch.stack(sound))

    @torch.no_grad()
    def adapt(
        self, state: State, model: nn.Module, support_x: Tensor, support_y: Tensor, query_x: Tensor | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Params]:
        """The average of the adapted models; the parameters are those adapted at the posterior's mean."""
        if len(support_x) == 0 or len(support_x) != len(support_y):
            raise ValueError(f"a support set needs inputs and as many targets, got {len(support_x)}, {len(support_y)}")
        alg = self.adaptation(model, state.params, steps=self.test_steps, order=1)
        alg.refuse_changing_buffers(support_x)
        params = {n: p.detach() for n, p in state.params.items()}
        draws = self.test_noise(next(iter(params.values())))
        models, sound = [], []
        for draw in [*draws, torch.zeros_like(draws[0])]:
            phi, _, start = self.adapted(alg, params, support_x, support_y, draw)
            models.append({**alg.held, **phi})
            sound.append(converges(alg, start, phi, support_x, support_y))
        *models, centre = models

        def predict(x: Tensor) -> Tensor:
            outputs = torch.stack([functional_call(model, phi, (x,)) for phi in models])
            return self.average(outputs, torch.stack(sound[:-1]))

        return predict, centre

    def average(self, outputs: Tensor, sound: Tensor) -> Tensor:
        """The mean of outputs in regression, the logarithm of the mean probability for classes; over sound draws.

        Step sizes are log-normal, so that now and then the inner loop of a draw diverges, which the support loss
        shows; a single such draw would be the whole of a mean. Where none is sound, all count.
        """
        if len(outputs) == 1:
            return outputs[0]
        sound = sound | ~sound.any(0)
        sound = sound.view(*sound.shape, *[1] * (outputs.ndim - sound.ndim))
        if not self._built().classes:
            return outputs.masked_fill(~sound, 0).sum(0) / sound.sum(0)
        return outputs.log_softmax(-1).masked_fill(~sound, -math.inf).logsumexp(0) - sound.sum(0).log()

    def noise(self, rows: int, stream: str, step: int, like: Tensor) -> Tensor:
        """Standard normal numbers, a row for each draw, from the seed and the step alone."""
        generator = torch.Generator().manual_seed(int(bits(self.seed, f"btaml/{stream}", step)) >> 1)
        return torch.randn(rows, self._built().draws, generator=generator, dtype=torch.float64).to(like)

    def test_noise(self, like: Tensor) -> Tensor:
        """The draws of a prediction: the same for every task, so that a trained learner is one fixed predictor."""
        if self.mc_samples == 0 or self._built().draws == 0:
            return like.new_zeros(1, self._built().draws)
        return self.noise(self.mc_samples, "test", 0, like)

    def over_tasks(self, key: Any, one: Callable[..., Any], alg: Adaptation, params: Params, *tasks: Tensor) -> Any:
        """``one`` for every task: vectorised, or looped where the model is convolutional and on a CPU."""
        key = (*key, id(alg))
        if key not in self._mapped:
            vectorised = alg.batching == "vmap"
            self._mapped[key] = vmap(one, in_dims=(None, *[0] * len(tasks))) if vectorised else looped(one)
        return self._mapped[key](params, *tasks)

    def _built(self) -> Encoder:
        assert self.encoder is not None
        return self.encoder


class Encoder(nn.Module):
    """The inference network: a support set to the posteriors of z, omega and gamma, and what these do to a task."""

    def __init__(
        self, model: nn.Module, alg: Adaptation, use: dict[str, bool], *, classes: bool, width: int, initial_sd: float
    ) -> None:
        super().__init__()
        linear = {
            n: layer for n, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd))
        }
        if not linear:
            raise ValueError("BTAML needs a model of linear layers or convolutions: it has none")
        first, (head, last) = next(iter(linear.values())), list(linear.items())[-1]
        self.classes = classes
        self.ways = int(last.weight.shape[0]) if classes else 1

        # gamma: which layer's step size each parameter has; a normalisation goes with the layer before it
        self.layer: dict[str, int] = {}
        layer = -1
        for n, part in model.named_modules():
            layer += n in linear
            for own, _ in part.named_parameters(prefix=n, recurse=False):
                self.layer[own] = max(layer, 0)

        # z: which parameters are moved, by how many numbers each
        self.moved = {
            n: len(p)
            for n, p in alg.theta.items()
            if n.rpartition(".")[2] in ("weight", "bias") and p.ndim and not (classes and n.rpartition(".")[0] == head)
        }
        sizes = {"z": sum(self.moved.values()), "omega": self.ways, "gamma": max(layer + 1, 1)}
        self.sizes = {name: size for name, size in sizes.items() if use[name] and size}
        self.draws = sum(self.sizes.values())
        if not self.draws:
            return

        half = width // 2
        if isinstance(first, nn.Linear):
            # in regression inputs alone say little of a task: the encoder sees pairs (x, y)
            n_in = first.in_features + (0 if classes else last.weight.shape[0])
            self.instance = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width))
        else:
            conv: Any = type(first)
            shrink = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[first.weight.ndim - 2]
            n_in = first.in_channels + (0 if classes else last.weight.shape[0])
            self.instance = nn.Sequential(
                conv(n_in, 10, 3, padding=1), nn.ReLU(), conv(10, 10, 3, stride=2, padding=1), nn.ReLU(), shrink(4),
                nn.Flatten(), nn.Linear(10 * 4 ** (first.weight.ndim - 2), width),
            )  # fmt: skip
        self.images = None if isinstance(first, nn.Linear) else first.weight.ndim - 1
        self.mix_instances = nn.Linear(STATISTICS, 4)
        self.set = nn.Sequential(nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, half))
        self.mix_classes = nn.Linear(STATISTICS, 4)
        self.heads = nn.ModuleDict()
        for name, size in self.sizes.items():
            n_in, n_out = (4 * width, 1) if name == "omega" else (4 * half, size)
            out = nn.Linear(width, 2 * n_out)
            self.heads[name] = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), out)
            nn.init.normal_(out.weight, std=0.02)
            nn.init.zeros_(out.bias)
            nn.init.constant_(out.bias[n_out:], math.log(math.expm1(initial_sd)))

    def forward(self, x: Tensor, y: Tensor) -> Posterior:
        """The mean and standard deviation of each variable, for one support set."""
        if self.classes:
            members = self.members(y).to(next(self.parameters()).dtype)
        else:
            members = torch.ones(1, len(x), dtype=x.dtype, device=x.device)
            x = self.joined(x, y)
        h = self.instance(x if self.images else x.reshape(len(x), -1))
        s = self.mix_instances(pooled(h, members)).relu().flatten(1)
        present = members.sum(1).clamp(max=1)
        t = self.mix_classes(pooled(self.set(s), present[None])).relu().flatten()
        q = {}
        for name, head in self.heads.items():
            mean, sd = head(s if name == "omega" else t).chunk(2, -1)
            q[name] = (mean.squeeze(-1), F.softplus(sd.squeeze(-1))) if name == "omega" else (mean, F.softplus(sd))
        return q

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        """Inputs and real-valued targets as one input: beside each other, or as further channels of an image."""
        y = y.reshape(len(y), -1)
        if self.images is None:
            return torch.cat([x.reshape(len(x), -1), y], 1)
        return torch.cat([x, y.reshape(*y.shape, *[1] * (self.images - 1)).expand(*y.shape, *x.shape[2:])], 1)

    def members(self, y: Tensor) -> Tensor:
        """Who is of which class, ``[ways, S]``."""
        return y == torch.arange(self.ways, device=y.device)[:, None]

    def draw(self, q: Posterior, noise: Tensor) -> dict[str, Tensor]:
        """A reparametrised draw from the posteriors."""
        parts = noise.split(list(self.sizes.values()))
        return {n: q[n][0] + q[n][1] * part for n, part in zip(self.sizes, parts, strict=True)}

    def balance(
        self, theta: Params, rates: dict[str, float | Tensor], drawn: dict[str, Tensor], y: Tensor
    ) -> tuple[Params, dict[str, float | Tensor], Tensor]:
        """The initial parameters moved by z, the step sizes by gamma, and omega as weights of the instances ``[S]``."""
        weights = torch.ones(len(y), dtype=next(iter(theta.values())).dtype, device=y.device)
        if "z" in drawn:
            moved = {}
            for (n, _), z in zip(self.moved.items(), drawn["z"].split(list(self.moved.values())), strict=True):
                bias = n.endswith("bias")
                moved[n] = theta[n] + z if bias else theta[n] * (1 + z.reshape(-1, *[1] * (theta[n].ndim - 1)))
            theta = {**theta, **moved}
        if "gamma" in drawn:
            rates = {n: rate * drawn["gamma"][self.layer[n]].exp() for n, rate in rates.items()}
        if "omega" in drawn:
            members = self.members(y)
            weights = class_weights(drawn["omega"], members.any(1)) @ members.to(weights.dtype)
        return theta, rates, weights


STATISTICS = 5


def pooled(x: Tensor, members: Tensor, eps: float = 1e-5) -> Tensor:
    """Sets ``members [c, n]`` (one or zero) of rows of ``x [n, d]`` as their statistics, ``[c, d, 5]``.

    Mean, variance, skewness, kurtosis (both standardised moments, zero where nothing varies), and log(1 + size).
    """
    size = members.sum(1)[:, None]
    share = (members / size.clamp(min=1))[:, None]  # [c, 1, n]
    mean = (share @ x)[:, 0]
    centred = x - mean[:, None]
    var, third, fourth = ((share @ centred**k)[:, 0] for k in (2, 3, 4))
    scale = var + eps
    return torch.stack([mean, var, third / scale**1.5, fourth / scale**2, size.log1p().expand_as(mean)], -1)


def class_weights(omega: Tensor, present: Tensor) -> Tensor:
    """omega: a softmax over the classes that a support set has, times their number, which it sums to."""
    return omega.masked_fill(~present, -math.inf).softmax(0) * present.sum()


def converges(alg: Adaptation, start: Params, phi: Params, sx: Tensor, sy: Tensor) -> Tensor:
    """Whether the support loss of adapted parameters is finite, and at most twice what it was."""
    after = alg.values(phi, sx, sy).mean()
    return after.isfinite() & (after <= 2 * alg.values(start, sx, sy).mean())


def divergence(q: Posterior) -> Tensor:
    """KL(q || N(0, 1)), summed over all variables."""
    parts = [((mean.square() + sd.square() - 1) / 2 - sd.log()).sum() for mean, sd in q.values()]
    return torch.stack(parts).sum()


def looped(one: Callable[..., Any]) -> Callable[..., Any]:
    """``one`` for a task after the other, its results stacked."""

    def mapped(params: Params, *tasks: Tensor) -> Any:
        return stacked([one(params, *task) for task in zip(*tasks, strict=True)])

    return mapped
