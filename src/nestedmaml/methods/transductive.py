"""Transductive fine-tuning (Dhillon, Chaudhari, Ravichandran and Soatto, "A Baseline for Few-Shot Image
Classification", ICLR 2020). Classification only.

Meta-training is plain cross-entropy on single images: the backbone gets a new head, with a logit for each global class
of the meta-training sources (``source.labelled(step, count)``, ``source.classes``). A test task adds a layer on top,
initialised from the support set: features are the rectified logits of the global classes, as in the paper (or, by
option, the backbone's own features), normalised to unit length; a class's weights are the normalised mean of its
support features, so that its logit is a cosine, times ``scale``. Then the whole network is fine-tuned on

    mean cross-entropy of the support set + entropy_weight * mean entropy of the query predictions.

Without a query set, as in ``learner.adapt(support_x, support_y)``, the entropy term is left out: the paper's inductive
fine-tuning. The base class's ``inner_*`` options and ``test_steps`` have no meaning here.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestedmaml.adaptation import Params, resolve_batching
from nestedmaml.methods.method import Figures, Method, State, count, make_optimizer, meta_step, norms, positive
from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.tasks.counter import bits

__all__ = ["TransductiveFineTuning"]

GLOBAL, TASK = "global.", "task."  # the head of pre-training, and the one on top for a task


@dataclass(kw_only=True)
class TransductiveFineTuning(Method):
    """Pre-train a classifier, then fine-tune all of it on a task's support labels and its query set's entropy.

    Args:
        head: the module of the model that is replaced by the global head; None is its last linear layer.
        classes: number of global classes; None: what the source says.
        pretrain_batch: images an iteration of pre-training; None: as many as ``batch`` in ``fit``.
        finetune_steps: steps of fine-tuning on a task, 25 in the paper.
        finetune_lr: their step size, with ``optimizer``; 5e-5 in the paper, whose networks are large.
        entropy_weight: of the entropy of the query predictions; 1 in the paper.
        imprint: what the task's head sees: the global classes' rectified "logits", or the backbone's "features".
        scale: of the cosines that are the task's logits before fine-tuning; 1 in the paper.
    """

    head: str | None = None
    classes: int | None = None
    pretrain_batch: int | None = 64
    finetune_steps: int = 25
    finetune_lr: float = 5e-5
    entropy_weight: float = 1.0
    imprint: Literal["logits", "features"] = "logits"
    scale: float = 1.0

    _network: _Network | None = field(default=None, init=False, repr=False)

    pretrains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_regression()
        positive(self, "finetune_lr", "scale")
        count(self, "finetune_steps")
        count(self, "classes", "pretrain_batch", least=1)
        if not (math.isfinite(self.entropy_weight) and self.entropy_weight >= 0):
            raise ValueError(f"entropy_weight must be a number >= 0, got {self.entropy_weight!r}")
        if self.imprint not in ("logits", "features"):
            raise ValueError(f"imprint must be 'logits' or 'features', got {self.imprint!r}")

    def _refuse_regression(self) -> None:
        """A loss that cannot take integer classes for targets is one for regression."""
        try:
            with warnings.catch_warnings(action="ignore"):
                fits = self.loss(torch.zeros(2, 3), torch.tensor([0, 2])).shape == (2,)
        except (ValueError, RuntimeError, TypeError, IndexError):
            fits = False
        if not fits:
            raise ValueError(
                "TransductiveFineTuning is for classification only: its loss must take logits [n, classes] and integer "
                f"classes [n], such as nestedmaml.losses.cross_entropy, got {getattr(self.loss, '__name__', self.loss)}"
            )

    def init(self, model: nn.Module, params: Params) -> State:
        """The model's parameters, and once the number of classes is known those of the global head."""
        # not used, but options that cannot be right are refused as everywhere
        self.adaptation(model, {n: params[n] for n, _ in model.named_parameters()})
        self._network = network = _Network(model, self.head, self.scale)
        own = {n: params[n] for n, _ in model.named_parameters()}
        if self.classes is not None:
            generator = torch.Generator().manual_seed(int(bits(self.seed, "transductive/head")) >> 1)
            bound = 1 / math.sqrt(network.width)
            weight = torch.empty(self.classes, network.width).uniform_(-bound, bound, generator=generator)
            new = {GLOBAL + "weight": weight, GLOBAL + "bias": torch.zeros(self.classes)}
            like = next(iter(own.values()))
            own |= {n: params[n] if n in params else p.to(like) for n, p in new.items()}
        return State(own, make_optimizer(self.optimizer, own.values(), self.meta_lr))

    def meet(self, state: State, model: nn.Module, source: Any) -> State:
        """The state for this source: with a global head for its classes."""
        if not hasattr(source, "labelled") or getattr(source, "classes", None) is None:
            raise ValueError(
                "TransductiveFineTuning pre-trains on single labelled images: it needs a source with "
                f"labelled(step, count) and classes, which {type(source).__name__} has not"
            )
        if self.classes is None:
            self.classes = int(source.classes)
            return self.init(model, state.params)
        if self.classes != int(source.classes):
            raise ValueError(f"the global head is for {self.classes} classes, the source has {source.classes}")
        return state

    @torch.no_grad()
    def step(self, state: State, model: nn.Module, train: Any, val: TaskBatch | None = None, **_: Any) -> Figures:
        """One step of cross-entropy on images ``(x, y)`` with global classes."""
        if isinstance(train, TaskBatch):
            raise ValueError(
                "TransductiveFineTuning pre-trains on single images with global classes, not on tasks: pass step a "
                "pair (x, y), or call fit with a source that has labelled(step, count)"
            )
        x, y = train
        _classes_only(y)
        if self.classes is None:
            raise ValueError("the number of global classes is not known: pass classes=, or call fit")
        network = self._built()

        def objective(learned: Params) -> Tensor:
            return self.loss(network.logits({**state.params, **learned}, x), y).mean()

        learning = {n: state.params[n].detach() for n in network.learned if n in state.params}
        grads, value = torch.func.grad_and_value(objective)(learning)
        sound = bool(norms({n: g[None] for n, g in grads.items()}).isfinite())
        if sound:
            meta_step(state, grads)
        state.step += 1
        return {"train_loss": value.item(), "diverged": float(not sound)}

    @torch.no_grad()
    def predictions(self, state: State, model: nn.Module, batch: TaskBatch) -> Tensor:
        """The logits for the query instances, after fine-tuning that has seen them without their labels."""
        _classes_only(batch.support_y)
        network, like = self._built(), next(iter(state.params.values()))
        if resolve_batching(self.batching, network, like.device) == "vmap":  # type: ignore[arg-type]
            tuned = self.finetune(state.params, batch.support_x, batch.support_y, batch.query_x)
            return vmap(network)(tuned, batch.query_x)
        out = []
        for sx, sy, qx in zip(batch.support_x, batch.support_y, batch.query_x, strict=True):
            tuned = self.finetune(state.params, sx[None], sy[None], qx[None])
            out.append(network({n: p[0] for n, p in tuned.items()}, qx))
        return torch.stack(out)

    @torch.no_grad()
    def adapt(
        self, state: State, model: nn.Module, support_x: Tensor, support_y: Tensor, query_x: Tensor | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Params]:
        """The network fine-tuned on one task; without ``query_x`` inductively, on the support set alone."""
        _classes_only(support_y)
        if len(support_x) == 0 or len(support_x) != len(support_y):
            raise ValueError(f"a support set needs inputs and as many labels, got {len(support_x)}, {len(support_y)}")
        network = self._built()
        query = None if query_x is None else query_x.to(support_x)[None]
        tuned = self.finetune(state.params, support_x[None], support_y[None], query)
        params = {n: p[0] for n, p in tuned.items()}
        return lambda x: network(params, x), params

    def finetune(
        self,
        params: Params,
        support_x: Tensor,
        support_y: Tensor,
        query_x: Tensor | None,
        report: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Params:
        """The fine-tuned parameters of each task, stacked; ``report`` gets both terms ``[m]`` before each step."""
        network, m = self._built(), len(support_x)
        params = {n: p.detach() for n, p in params.items()}
        use_logits = self.imprint == "logits" and GLOBAL + "weight" in params
        start = [network.imprinted(params, x, y, use_logits) for x, y in zip(support_x, support_y, strict=True)]
        tuned = {n: params[n].expand(m, *params[n].shape).clone() for n in network.learned if n in params}
        if not use_logits:
            tuned = {n: p for n, p in tuned.items() if not n.startswith(GLOBAL)}
        tuned |= {n: torch.stack([task[n] for task in start]) for n in start[0]}
        fixed = [n for n in network.frozen if n in params]
        optimizer = make_optimizer(self.optimizer, tuned.values(), self.finetune_lr)

        def objective(own: Params, *task: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            own = {**own, **{n: params[n] for n in fixed}}
            known = self.loss(network(own, task[0]), task[1]).mean()
            unknown = entropy(network(own, task[2])).mean() if len(task) > 2 else torch.zeros_like(known)
            return known + self.entropy_weight * unknown, (known, unknown)

        tasks = (support_x, support_y) if query_x is None else (support_x, support_y, query_x)
        gradient = vmap(grad(objective, has_aux=True)) if m > 1 else _single(grad(objective, has_aux=True))
        for _ in range(self.finetune_steps):
            # torch's optimizers work element by element, so that stacked tasks do not see each other
            grads, terms = gradient({n: p.detach() for n, p in tuned.items()}, *tasks)
            if report is not None:
                report(*terms)
            sound = norms(grads).isfinite()
            for n, p in tuned.items():
                p.grad = grads[n].masked_fill(~sound.view(-1, *[1] * (p.ndim - 1)), 0)
            optimizer.step()
        tuned = {n: p.detach() for n, p in tuned.items()}
        return tuned | {n: params[n].expand(m, *params[n].shape) for n in fixed}

    def use_compiler(self, model: nn.Module, params: Params, *, forced: bool) -> None:
        """Nothing here is compiled: there is no meta-gradient."""

    def _built(self) -> _Network:
        assert self._network is not None
        return self._network


class _Network(nn.Module):
    """The model without its head, the global head, and the one on top for a task, as functions of their parameters."""

    def __init__(self, model: nn.Module, head: str | None, scale: float) -> None:
        super().__init__()
        linear = [n for n, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        head = (linear[-1] if linear else None) if head is None else head
        if head is None or head not in linear:
            raise ValueError(f"head must name a linear layer of the model, got {head!r}; it has {linear or 'none'}")
        old = model.get_submodule(head)
        self.width, self.ways, self.scale = int(old.in_features), int(old.out_features), scale  # type: ignore[arg-type]
        if head == "":
            self.backbone: nn.Module = nn.Identity()
        else:
            self.backbone = copy.deepcopy(model)
            self.backbone.set_submodule(head, nn.Identity())
        own = dict(self.backbone.named_parameters())
        self.learned = [*(n for n, p in own.items() if p.requires_grad), GLOBAL + "weight", GLOBAL + "bias"]
        self.frozen = [n for n, p in own.items() if not p.requires_grad]

    def features(self, params: Params, x: Tensor) -> Tensor:
        """What the backbone makes of ``x``."""
        own = {n: params[n] for n, _ in self.backbone.named_parameters()}
        return functional_call(self.backbone, own, (x,))

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Those of the global classes."""
        return nn.functional.linear(self.features(params, x), params[GLOBAL + "weight"], params[GLOBAL + "bias"])

    def unit(self, params: Params, x: Tensor, use_logits: bool) -> Tensor:
        """What the task's head sees, of unit length."""
        return nn.functional.normalize(
            self.logits(params, x).relu() if use_logits else self.features(params, x), dim=-1
        )

    def imprinted(self, params: Params, x: Tensor, y: Tensor, use_logits: bool) -> Params:
        """A head from a support set; a class that it does not have gets the lowest cosine, minus one."""
        members = (y == torch.arange(self.ways, device=y.device)[:, None]).to(next(iter(params.values())).dtype)
        weight = nn.functional.normalize(members @ self.unit(params, x, use_logits), dim=-1)
        bias = -(members.sum(1) == 0).to(weight.dtype)
        return {TASK + "weight": self.scale * weight, TASK + "bias": self.scale * bias}

    def forward(self, params: Params, x: Tensor) -> Tensor:
        """The task's logits."""
        unit = self.unit(params, x, GLOBAL + "weight" in params)
        return nn.functional.linear(unit, params[TASK + "weight"], params[TASK + "bias"])


def entropy(logits: Tensor) -> Tensor:
    """The entropy of each prediction, ``[n]``."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def _single(one: Callable[..., Any]) -> Callable[..., Any]:
    """``one`` for a stack of a single task, without vmap."""

    def mapped(params: Params, *task: Tensor) -> Any:
        grads, terms = one({n: p[0] for n, p in params.items()}, *(part[0] for part in task))
        return {n: g[None] for n, g in grads.items()}, tuple(term[None] for term in terms)

    return mapped


def _classes_only(y: Tensor) -> None:
    if y.is_floating_point():
        raise ValueError(
            "TransductiveFineTuning is for classification only: its targets are integer classes, got reals"
        )
