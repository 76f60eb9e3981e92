"""The training loop, readable from top to bottom."""

from __future__ import annotations

import csv
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestedmaml.sampling import clean_batch, weighted_batch
from nestedmaml.tasks.batch import TaskBatch

if TYPE_CHECKING:
    from torch import Tensor

    from nestedmaml.learner import Learner

__all__ = ["HISTORY", "train"]

log = logging.getLogger("nestedmaml")

HISTORY = (
    "iteration", "train_loss", "val_loss", "test", "weight_mean", "weight_clean", "weight_corrupt",
    "weight_clean_sd", "weight_corrupt_sd", "diverged", "seconds",
)  # fmt: skip
"""The columns of history.csv; empty where unknown."""

Callback = Callable[["Learner", dict[str, float]], Any]


def train(
    learner: Learner,
    source: Any,
    val_source: Any,
    *,
    iterations: int,
    batch: int,
    val_batch: int,
    out: Path | None,
    callbacks: Iterable[Callback],
    every: int,
    score: bool,
    decay: bool,
) -> None:
    """Run iterations until ``learner.iteration`` is ``iterations``; Ctrl-C ends it early and keeps what is learned.

    Every ``every`` iterations a row joins ``learner.history`` and, with ``out``, history.csv. ``score`` adds the mean
    weight of clean and of corrupt tasks, where the source knows them: it looks at the truth, and nothing learns of it.
    """
    from tqdm import tqdm

    set_rate(learner, 1)  # a checkpoint of a run that decayed may have been taken up
    bar = tqdm(
        total=iterations, initial=learner.iteration, desc=learner.name, disable=not sys.stderr.isatty(), leave=False
    )
    began, done = time.perf_counter(), learner.iteration
    try:
        while learner.iteration < iterations:
            tasks, correction = draw(learner, source, batch)
            val = val_source.sample(learner.iteration, val_batch) if learner.method.needs_val else None
            if decay:
                set_rate(learner, (1 + math.cos(math.pi * learner.iteration / iterations)) / 2)
            figures = learner._iterate(tasks, val, correction)
            learner._pending.append(figures)
            due = learner.iteration % every == 0 or learner.iteration == iterations
            if due:
                now = time.perf_counter()
                rows, learner._pending = learner._pending, []
                row = {
                    "iteration": learner.iteration,
                    **mean(rows),
                    "seconds": (now - began) / (learner.iteration - done),
                }
                row["diverged"] = sum(entry.get("diverged", 0.0) for entry in rows)
                if score:
                    row |= weights_by_truth(learner, source)
                learner.history.append(row)
                bar.set_postfix_str(f"loss {row['train_loss']:.3g}", refresh=False)
            for callback in callbacks:
                callback(learner, learner.history[-1] if due else figures)
            if due and out is not None:
                append_row(out / "history.csv", learner.history[-1])
            if due:  # what was looked at in between is no part of an iteration
                began, done = time.perf_counter(), learner.iteration
            bar.update()
    except KeyboardInterrupt:
        log.warning("stopped at iteration %d of %d; what was learned is kept", learner.iteration, iterations)
    finally:
        bar.close()
        if decay:
            set_rate(learner, 1)
    learner._warn_about_weights()


def set_rate(learner: Learner, share: float) -> None:
    """Give the meta-optimizer this share of its step size."""
    for group in learner.state.optimizer.param_groups:
        group["lr"] = learner.method.meta_lr * share


def draw(learner: Learner, source: Any, count: int) -> tuple[TaskBatch, Tensor | None]:
    """The training tasks of this iteration, and their importance factors where sampling is weighted."""
    method, step = learner.method, learner.iteration
    if getattr(method, "sampling", "uniform") == "weighted":
        return weighted_batch(source, learner._weights_at, step, count, explore=method.explore, seed=method.seed)  # type: ignore[attr-defined]
    if getattr(method, "refill", False):
        return clean_batch(source, step, count, seed=method.seed), None
    if method.pretrains:
        return source.labelled(step, getattr(method, "pretrain_batch", None) or count), None
    return source.sample(step, count), None


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure, NaN aside."""
    out = {}
    for name in rows[-1]:
        values = [row[name] for row in rows if row.get(name) == row.get(name)]
        out[name] = sum(values) / len(values) if values else float("nan")
    return out


def weights_by_truth(learner: Learner, source: Any, most: int = 2000) -> dict[str, float]:
    """Mean and spread of the weights of clean and of corrupt tasks, over at most ``most`` of the pool."""
    import torch

    rule, known = learner.method.weighting, learner._knowledge
    if rule is None or known is None or not hasattr(source, "corrupt") or not rule.knows(known):
        return {}
    size = known.size
    assert size is not None
    ids = torch.arange(size)
    if size > most:
        ids = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:most].sort().values
    weights, corrupt = learner._weights_at(ids).double().cpu(), source.corrupt(ids, level=rule.level)
    row = {}
    for name, part in (("clean", weights[~corrupt]), ("corrupt", weights[corrupt])):
        if len(part):
            row[f"weight_{name}"] = part.mean().item()
            row[f"weight_{name}_sd"] = part.std(correction=0).item()
    return row


def append_row(path: Path, row: dict[str, float]) -> None:
    """Add a row to history.csv."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(HISTORY)
        writer.writerow([row.get(name, "") for name in HISTORY])
