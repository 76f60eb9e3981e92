"""Recovery: how much of what the corruption costs MAML a method wins back.

(method - MAML) / (skyline - MAML), the ratio of means over seeds: 0 is MAML, 1 is the skyline. It does not
depend on the scale of the metric, nor on whether more is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Recovery", "recovery"]


@dataclass(frozen=True)
class Recovery:
    """Recovery with its 95 % interval, and the differences to report where it means nothing."""

    value: float
    low: float
    high: float
    clear: bool  # MAML and the skyline differ by at least twice the standard error of their difference
    gap: float  # skyline - MAML
    gap_error: float
    difference: float  # method - MAML
    difference_error: float

    def __str__(self) -> str:
        if not self.clear:
            error = "" if math.isnan(self.difference_error) else f" ± {1.96 * self.difference_error:.2g}"
            return f"{self.difference:+.3g}{error} against MAML (the gap is not clear)"
        return f"{self.value:.2f}" + ("" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]")


def recovery(
    method: Sequence[ArrayLike],
    maml: Sequence[ArrayLike],
    skyline: Sequence[ArrayLike],
    rng_seed: int = 0,
    *,
    same_tasks: bool = False,
    errors: tuple[Sequence[float], Sequence[float], Sequence[float]] | None = None,
    draws: int = 4000,
) -> Recovery:
    """Recovery of a method, with a bootstrap interval over seeds and test tasks.

    Each of the three is a list over the same seeds, of one value per test task or of one mean. The three are
    paired: at one seed they saw the same training batches and the same test tasks, and are drawn together.

    Args:
        method: The values of the method.
        maml: The values of MAML, which is 0.
        skyline: The values of the skyline, which is 1.
        rng_seed: Of the bootstrap.
        same_tasks: All seeds were tested on the same tasks, which are then drawn once for all seeds.
        errors: Where there is one mean per seed, the standard errors of these means over test tasks.
        draws: Of the bootstrap.
    """
    data = _stack(method, maml, skyline)
    _, seeds, tasks = data.shape
    noise = None if errors is None or tasks > 1 else np.asarray(errors, dtype=float)
    if noise is not None and noise.shape != (3, seeds):
        raise ValueError(f"errors of shape {noise.shape} for three methods at {seeds} seeds")

    means = data.mean(axis=(1, 2))
    difference, gap = means[0] - means[1], means[2] - means[1]
    difference_error, gap_error = (_error(data, noise, i, same_tasks) for i in (0, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.divide(difference, gap))
        low, high = math.nan, math.nan
        if seeds > 1 or tasks > 1 or noise is not None:
            drawn = _bootstrap(data, noise, np.random.default_rng(rng_seed), same_tasks, draws)
            ratios = (drawn[0] - drawn[1]) / (drawn[2] - drawn[1])
            if np.isfinite(ratios).all():
                low, high = (float(q) for q in np.quantile(ratios, [0.025, 0.975]))
    return Recovery(
        value=value,
        low=low,
        high=high,
        clear=bool(gap != 0 and abs(gap) >= 2 * gap_error),  # False as well where the error is not known
        gap=float(gap),
        gap_error=gap_error,
        difference=float(difference),
        difference_error=difference_error,
    )


def _stack(*methods: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """[3, seeds, tasks], the tasks one where a mean is all there is."""
    try:
        arrays = [np.asarray([np.atleast_1d(np.asarray(v, dtype=float)) for v in m]) for m in methods]
        data = np.stack(arrays)
    except ValueError:
        data = np.empty(0)
    if data.ndim != 3 or data.size == 0:
        sizes = [[np.size(v) for v in m] for m in methods]
        raise ValueError(f"recovery compares the same seeds and as many test tasks for each method; got {sizes}")
    return data


def _error(data: NDArray[np.float64], noise: NDArray[np.float64] | None, i: int, same_tasks: bool) -> float:
    """Standard error of the paired difference between method ``i`` and MAML.

    The spread over seeds has the spread over their test tasks in it, unless the tasks were the same.
    """
    paired = data[i] - data[1]
    seeds, tasks = paired.shape
    variance = 0.0
    if seeds > 1:
        variance += paired.mean(axis=1).var(ddof=1) / seeds
    if tasks > 1 and (seeds == 1 or same_tasks):
        variance += paired.mean(axis=0).var(ddof=1) / tasks
    if seeds == tasks == 1:
        variance = math.nan if noise is None else float(noise[i, 0] ** 2 + noise[1, 0] ** 2)
    return math.sqrt(variance)


def _bootstrap(
    data: NDArray[np.float64],
    noise: NDArray[np.float64] | None,
    rng: np.random.Generator,
    same_tasks: bool,
    draws: int,
) -> NDArray[np.float64]:
    """[3, draws] means over seeds and test tasks, both drawn with replacement."""
    _, seeds, tasks = data.shape
    total = np.zeros((3, draws))
    task = rng.integers(tasks, size=(draws, tasks))
    for _ in range(seeds):
        seed = rng.integers(seeds, size=draws)
        if tasks == 1:
            total += data[:, seed, 0]
            if noise is not None:
                total += noise[:, seed] * rng.standard_normal((3, draws))
            continue
        if not same_tasks:
            task = rng.integers(tasks, size=(draws, tasks))
        for i in range(3):
            total[i] += data[i][seed[:, None], task].mean(axis=1)
    return total / seeds
