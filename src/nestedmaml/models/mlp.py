"""The multi-layer perceptron of the sinusoid: 1-40-40-1 in Finn et al. (2017) and in the paper."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def mlp(sizes: Sequence[int] = (1, 40, 40, 1), *, seed: int = 0) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them, initialised from ``seed``."""
    if len(sizes) < 2:
        raise ValueError(f"an mlp needs an input and an output size, got {list(sizes)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    model.spec = {"name": "mlp", "sizes": list(sizes)}  # type: ignore[assignment]
    return model
