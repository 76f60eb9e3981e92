"""What the weighting rules share: how a learned number becomes a weight, and how a hypergradient moves it.

A rule is a frozen description with two functions, ``init`` and ``update`` of an explicit state. Its own file says only
which numbers are learned and which of them a task or an instance looks up; here is the rest.

Two forms. ``"linear"``, the paper's: the number is the weight, kept above zero by clamping. ``"exp"``, anchored:
the weight is the exponential of a logit in [-bound, 0], divided by its mean over the pool. A constant added to all
weights only rescales the meta-step, so there the hypergradient counts against its running weighted mean (the anchor):
who helps validation less than ``margin`` times as much as the weighted pool does on average loses weight. The ceiling
at 0 keeps those who help from competing with each other, which would soon leave only a few of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting.features import Knowledge, Level

__all__ = ["Rule", "State"]

State = dict[str, dict[str, Tensor]]
"""Tensors by group: ``learned`` numbers, their ``moments``, ``fixed`` data, ``running`` means."""

_CHOICES = {
    "level": ("task", "instance"),
    "form": ("exp", "linear"),
    "normalize": ("none", "batch", "window", "pool", "task"),
    "optimizer": ("sgd", "adam", "adagrad"),
}
_MOMENTS = {"sgd": (), "adam": ("mean", "square", "count"), "adagrad": ("square",)}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Options that all rules have.

    Args:
        level: weigh whole tasks ("task") or single query instances ("instance").
        form: "exp" or "linear", see above.
        initial: the weight at the start, and the mean weight where weights are normalised; None is MAML's own, 1 for
            a task and 1/K for an instance.
        bound: logits stay above -bound ("exp"), weights below bound times initial ("linear").
        normalize: divide by the mean weight of the "batch", of a running "window" or of the whole "pool"; "task"
            (instances only) makes the weights of each task sum to K times initial; "none" is the paper's.
        anchored: measure hypergradients against ``margin`` times their running weighted mean.
        margin: see anchored; 0 asks whether a task helps at all, 1 whether it helps more than the average.
        cosine: divide a task's hypergradients by the norm of its gradient to this power: at 1 the angle to the
            validation gradient counts, not how loud a task is; 0 is the raw inner product of the paper.
        mirror: move a logit by the hypergradient of its weight (mirror descent), not by that times the weight, which
            dies with it ("exp" only).
        optimizer: of the learned numbers, each with its own moments, which advance when it took part: "sgd", "adam",
            or "adagrad", whose steps shrink as evidence adds up, so that weights settle.
        lr: step size; None takes the learner's ``weight_lr``.
        warmup: iterations during which the weights stay as they are.
    """

    level: Level = "task"
    form: Literal["exp", "linear"] = "exp"
    initial: float | None = None
    bound: float = 10.0
    normalize: Literal["none", "batch", "window", "pool", "task"] = "pool"
    anchored: bool = True
    margin: float = 0.5
    cosine: float = 1.0
    mirror: bool = True
    optimizer: Literal["sgd", "adam", "adagrad"] = "adagrad"
    lr: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.normalize == "task" and self.level == "task":
            raise ValueError(
                "normalize='task' relates the instances of a task to each other: it needs level='instance'"
            )
        for name in ("lr", "margin", "cosine", "warmup"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number >= 0, got {value}")
        for name in ("initial", "bound"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number > 0, got {value}")

    # What a rule's own file adds ---------------------------------------------------------------------------

    def create(self, knowledge: Knowledge, first: float, device: torch.device) -> State:
        """The groups ``learned`` and ``fixed``, such that every raw value is ``first``."""
        raise NotImplementedError

    def locate(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """Where the tasks or instances of a batch look: indices, or features."""
        raise NotImplementedError

    def locate_ids(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The same for ids of the pool."""
        raise NotImplementedError

    def raw(self, learned: dict[str, Tensor], state: State, where: Tensor) -> Tensor:
        """The raw value at each place: a logit, or in the linear form a weight."""
        raise NotImplementedError

    def pool(self, learned: dict[str, Tensor], state: State) -> tuple[Tensor, Tensor]:
        """Raw values that stand for the whole pool, with their shares of it."""
        raise NotImplementedError

    def knows(self, knowledge: Knowledge) -> bool:
        """Whether `at` can be asked for the weights of the pool."""
        return knowledge.size is not None and knowledge.by_id

    # What all have -----------------------------------------------------------------------------------------

    def init(self, knowledge: Knowledge, *, queries: int, device: torch.device | str = "cpu") -> State:
        """The first state: all weights equal."""
        mamls = 1.0 if self.level == "task" else 1.0 / queries
        unit = mamls if self.initial is None else self.initial
        state = self.create(knowledge, 0.0 if self.form == "exp" else unit, torch.device(device))
        state["fixed"]["unit"] = torch.tensor(unit, dtype=torch.float64)
        state["moments"] = {
            f"{name}.{part}": torch.zeros_like(value)
            for name, value in state["learned"].items()
            for part in _MOMENTS[self.optimizer]
        }
        state["running"] = {n: torch.zeros((), dtype=torch.float64) for n in ("help", "weight", "mean", "updates")}
        return state

    @torch.no_grad()
    def weights(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """The weights of a batch, ``[m]`` or ``[m, K]``."""
        return self.shape(state["learned"], state, self.locate(state, knowledge, batch))

    @torch.no_grad()
    def at(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The weights of any ids of the pool. Where weights are normalised over a batch, the ids count as one."""
        return self.shape(state["learned"], state, self.locate_ids(state, knowledge, ids))

    @torch.enable_grad()
    def update(
        self,
        state: State,
        knowledge: Knowledge,
        batch: TaskBatch,
        hypergradient: Tensor,
        *,
        lr: float,
        norms: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> State:
        """One step of eq. ``online-equation-weight``: the state after a hypergradient.

        ``norms [m]`` are those of the tasks' gradients. ``correction [m]`` holds the importance factors that
        multiplied the weights, and that the hypergradient has as a factor too. The old state is used up: a table's
        rows are written in place, so that an update costs the same however large the table is.
        """
        where = self.locate(state, knowledge, batch)
        running = dict(state["running"])
        running["updates"] = running["updates"] + 1
        h = hypergradient.detach().double()
        c = torch.ones_like(h) if correction is None else _as_rows(correction.to(h), h).expand_as(h)
        if self.cosine and norms is not None:
            h = h / _as_rows(norms.to(h), h).clamp_min(torch.finfo(h.dtype).tiny) ** self.cosine
        h = torch.where(h.isfinite(), h, 0.0)
        if self.normalize == "window":
            mean = self._positive(self.raw(state["learned"], state, where), state).detach().mean().double().cpu()
            running["mean"] = mean if running["updates"] == 1 else 0.95 * running["mean"] + 0.05 * mean
        if self.anchored:
            w = self.shape(state["learned"], state, where).detach().double()
            running["help"] = 0.95 * running["help"] + 0.05 * (w * h).mean().cpu()
            running["weight"] = 0.95 * running["weight"] + 0.05 * (c * w).mean().cpu()
            if running["weight"] > 0:
                h = h - self.margin * c * (running["help"] / running["weight"]).to(h)
        state = {**state, "running": running}
        if running["updates"] <= self.warmup:
            return state
        return self._descend(state, where, h, lr if self.lr is None else self.lr)

    def shape(self, learned: dict[str, Tensor], state: State, where: Tensor) -> Tensor:
        """From learned numbers to weights, differentiably, normalisation included."""
        a = self._positive(self.raw(learned, state, where), state)
        unit = state["fixed"]["unit"].to(a)
        if self.normalize == "none":
            return a * unit if self.form == "exp" else a
        if self.normalize == "batch":
            mean = a.mean()
        elif self.normalize == "task":
            mean = a.mean(1, keepdim=True)
        elif self.normalize == "window" and state["running"]["mean"] > 0:
            mean = state["running"]["mean"].to(a)
        elif self.normalize == "window":
            mean = a.mean().detach()
        else:
            raw, shares = self.pool(learned, state)
            mean = (self._positive(raw, state) * shares).sum()
        return torch.where(mean > 0, a * unit / mean.clamp_min(torch.finfo(a.dtype).tiny), 0.0)

    def _descend(self, state: State, where: Tensor, h: Tensor, lr: float) -> State:
        learned = {n: t.detach().requires_grad_() for n, t in state["learned"].items()}
        grads = torch.autograd.grad(self._aim(learned, state, where, h), list(learned.values()))
        out, moments = {}, dict(state["moments"])
        for (n, t), g in zip(state["learned"].items(), grads, strict=True):
            own = {part: state["moments"][f"{n}.{part}"] for part in _MOMENTS[self.optimizer]}
            step, own = self._step(g, own)
            out[n] = self.project(t - lr * step, state)
            moments |= {f"{n}.{part}": value for part, value in own.items()}
        return {**state, "learned": out, "moments": moments}

    def _aim(self, learned: dict[str, Tensor], state: State, where: Tensor, h: Tensor) -> Tensor:
        """The linearised validation loss, whose gradient in the learned numbers is wanted."""
        if self.form == "exp" and self.mirror:
            return (h * self.raw(learned, state, where)).sum()
        return (h * self.shape(learned, state, where)).sum()

    def _step(self, g: Tensor, moments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The optimizer, number by number; a zero gradient is taken as "did not take part"."""
        if self.optimizer == "sgd":
            return g, moments
        if self.optimizer == "adagrad":
            square = moments["square"] + g * g
            return torch.where(g != 0, g / square.sqrt().clamp_min(1e-150), 0.0), {"square": square}
        took_part = g != 0
        count = moments["count"] + took_part
        mean = torch.where(took_part, 0.9 * moments["mean"] + 0.1 * g, moments["mean"])
        square = torch.where(took_part, 0.99 * moments["square"] + 0.01 * g * g, moments["square"])
        past = count.clamp_min(1)
        step = mean / (1 - 0.9**past) / (square / (1 - 0.99**past)).sqrt().clamp_min(1e-150)
        return torch.where(took_part, step, 0.0), {"mean": mean, "square": square, "count": count}

    def project(self, learned: Tensor, state: State) -> Tensor:
        """Bring learned numbers back into their range."""
        return learned.clamp(*self._range(state))

    def _range(self, state: State) -> tuple[float, float]:
        if self.form == "exp":
            return -self.bound, 0.0
        return 0.0, self.bound * float(state["fixed"]["unit"])

    def _positive(self, raw: Tensor, state: State) -> Tensor:
        raw = raw.clamp(*self._range(state))
        return raw.exp() if self.form == "exp" else raw


def _as_rows(per_task: Tensor, like: Tensor) -> Tensor:
    return per_task[:, None] if like.ndim == 2 and per_task.ndim == 1 else per_task
