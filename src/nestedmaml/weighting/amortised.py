"""Weights from a small network on features: shared by resemblance, trained by the same hypergradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nestedmaml.tasks.batch import TaskBatch
from nestedmaml.weighting.features import Knowledge
from nestedmaml.weighting.rule import Rule, State

__all__ = ["Amortised"]

REFERENCE = 2048  # places of the pool that stand for all of it where weights are normalised


@dataclass(frozen=True, kw_only=True)
class Amortised(Rule):
    """One hidden layer of ``width`` tanh units on standardised features; its last layer starts at zero.

    ``share``: the logit starts this share of the way down to -bound, where the network can move it both ways.
    """

    width: int = 64
    share: float = 0.1
    optimizer: str = "adam"  # type: ignore[assignment]
    lr: float | None = 3e-3

    def create(self, knowledge: Knowledge, first: float, device: torch.device) -> State:
        """The network, and features that stand for the pool."""
        features = knowledge.sample(REFERENCE).double()
        shift, scale = features.mean(0), features.std(0, correction=0)
        gen = torch.Generator().manual_seed(knowledge.seed)
        n = features.shape[-1]
        hidden = torch.randn(n, self.width, generator=gen, dtype=torch.float64) / math.sqrt(n)
        zeros = torch.zeros(self.width, dtype=torch.float64)
        learned = {"hidden": hidden, "hidden_bias": zeros, "out": zeros.clone(), "out_bias": zeros[:1].clone()}
        fixed = {"shift": shift, "scale": torch.where(scale > 1e-8, scale, 1.0), "first": torch.tensor(first).double()}
        fixed["reference"] = (features - fixed["shift"]) / fixed["scale"]
        return {
            "learned": {name: value.to(device) for name, value in learned.items()},
            "fixed": {name: value.to(device) for name, value in fixed.items()},
        }

    def locate(self, state: State, knowledge: Knowledge, batch: TaskBatch) -> Tensor:
        """The standardised features of each task or instance."""
        return self._standard(state, knowledge.of_batch(batch))

    def locate_ids(self, state: State, knowledge: Knowledge, ids: Tensor) -> Tensor:
        """The standardised features of ids of the pool."""
        return self._standard(state, knowledge.of_ids(ids))

    def raw(self, learned: dict[str, Tensor], state: State, where: Tensor) -> Tensor:
        """The network."""
        out = torch.tanh(where @ learned["hidden"] + learned["hidden_bias"]) @ learned["out"] + learned["out_bias"]
        if self.form == "linear":
            return state["fixed"]["first"] + out
        return -self.bound * torch.sigmoid(out + math.log(self.share / (1 - self.share)))

    def pool(self, learned: dict[str, Tensor], state: State) -> tuple[Tensor, Tensor]:
        """The reference features, in equal shares."""
        raw = self.raw(learned, state, state["fixed"]["reference"])
        return raw, torch.full_like(raw, 1 / len(raw))

    def project(self, learned: Tensor, state: State) -> Tensor:
        """The network's parameters are free; the sigmoid bounds what it says."""
        return learned

    def _standard(self, state: State, features: Tensor) -> Tensor:
        return (features.to(state["fixed"]["shift"]) - state["fixed"]["shift"]) / state["fixed"]["scale"]
