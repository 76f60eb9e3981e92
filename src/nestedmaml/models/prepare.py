"""Make a module with running statistics usable: meta-gradients cannot pass a buffer that is written in place."""

from __future__ import annotations

import copy
import logging
from typing import Literal

from torch import nn

__all__ = ["prepare"]

log = logging.getLogger("nestedmaml")


def prepare(model: nn.Module, batch_norm: Literal["batch", "frozen"] = "batch") -> nn.Module:
    """A copy of ``model`` that meta-gradients can pass: no running statistics, no dropout. Logs what it changed.

    ``"batch"`` normalises with the statistics of the batch at hand, as MAML does (transductive at test time, when
    the batch is the query set); ``"frozen"`` keeps the running statistics a pretrained model came with.
    """
    if batch_norm not in ("batch", "frozen"):
        raise ValueError(f"batch_norm must be 'batch' or 'frozen', got {batch_norm!r}")
    model = copy.deepcopy(model)
    changes = []
    for name, layer in model.named_modules():
        where = f"{name or 'model'} ({type(layer).__name__})"
        if getattr(layer, "track_running_stats", False):
            if batch_norm == "frozen":
                layer.eval()
                changes.append(f"{where}: frozen at its running statistics")
            else:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
                changes.append(f"{where}: normalises with the statistics of the batch")
        elif isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            changes.append(f"{where}: dropout of {layer.p} switched off")
            layer.p = 0.0
    log.warning("prepare: %s", "; ".join(changes) or "nothing to change")
    return model
