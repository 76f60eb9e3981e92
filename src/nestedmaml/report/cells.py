"""From rows to cells: what each method measured under the same conditions, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nestedmaml.experiments.results import Row
from nestedmaml.report import paper
from nestedmaml.report.recovery import Recovery, recovery

__all__ = ["CELL", "NAMES", "TOLD", "Cell", "Line", "cells", "name", "place"]

NAMES = {
    "maml": "MAML",
    "maml-ood-rm": "MAML-OOD-RM",
    "maml-ood-rm-refill": "MAML-OOD-RM, refilled",
    "maml-noise-rm": "MAML-Noise-RM",
    "maml-noise-rm-support": "MAML-Noise-RM, support too",
    "maml-val": "MAML, validation tasks only",
    "maml-both": "MAML, both pools",
    "l2r": "L2R",
    "mmaml": "MMAML",
    "btaml": "B-TAML",
    "transductive": "Transductive fine-tuning",
    "nested": "NestedMAML",
    "nested-fo": "NestedMAML-FO",
    "nested-weighted": "NestedMAML, weighted sampling",
    "nested-paper": "NestedMAML, the paper's form",
}
SKYLINES = ("maml-ood-rm", "maml-noise-rm", "maml-noise-rm-support")  # the first that was run
TOLD = (SKYLINES[0], "maml-ood-rm-refill", *SKYLINES[1:])  # these ask which data is corrupt
REFILLED = {"nested-weighted": ("maml-ood-rm-refill",)}  # it also chooses what it samples
_PLACE = {method: place for place, method in enumerate(dict.fromkeys([*TOLD, *NAMES]))}
CELL = ("experiment", "scale", "metric", "source", "ood_source", "variant", "iterations", "shots", "ratio")


@dataclass(frozen=True)
class Line:
    """One method in one cell, over its seeds. Mean squared errors are plain; the paper's are MSE / K."""

    method: str
    detail: str  # weighting, clusters, validation tasks
    seeds: tuple[int | None, ...]
    mean: float
    ci95: float  # over seeds; with one seed, over test tasks
    recovery: Recovery | None
    multiple: float | None  # of the skyline's error
    seconds: float | None
    paper: float | None
    paper_recovery: float | None


@dataclass(frozen=True)
class Cell:
    """The methods that were run under the same conditions, which `key` names."""

    key: dict[str, str | int | float | None]
    lines: tuple[Line, ...]

    def line(self, method: str) -> Line | None:
        """The first line of a method."""
        return next((line for line in self.lines if line.method == method), None)


def name(method: str) -> str:
    """The method's name in the paper's words."""
    return NAMES.get(method, method)


def place(method: str) -> int:
    """Where a method stands among others: skylines, then MAML, then the rest."""
    return _PLACE.get(method, len(_PLACE))


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The rows by cell, in order, with all that is computed across methods and seeds."""
    grouped = _grouped(rows, lambda row: tuple(getattr(row, part) for part in CELL))
    grouped.sort(key=lambda item: item[0][CELL.index("metric")] not in ("mse", "accuracy"))  # what is asked for first
    return [_cell(dict(zip(CELL, key, strict=True)), group) for key, group in grouped]


def _grouped(rows, by):  # type: ignore[no-untyped-def]
    """Pairs of key and rows, sorted by key; an empty number comes first."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return sorted(groups.items(), key=lambda item: [(part is not None, part) for part in item[0]])


def _cell(key: dict, rows: list[Row]) -> Cell:
    by_line: dict[tuple[str, str], dict[int | None, Row]] = {}
    for row in rows:  # a seed that was run again under other options (another config): the later counts
        by_line.setdefault((row.method, _detail(row)), {})[row.seed] = row
    first = {method: by_seed for (method, _), by_seed in reversed(by_line.items())}
    lines = [_line(key, method, detail, by_seed, first) for (method, detail), by_seed in by_line.items()]
    return Cell(key, tuple(sorted(lines, key=lambda line: place(line.method))))


def _detail(row: Row) -> str:
    clusters = f"{row.clusters} clusters" if row.clusters else ""
    val_size = f"{row.val_size} validation tasks" if row.val_size else ""
    weighting = "" if clusters and row.weighting == "cluster" else row.weighting
    return ", ".join(part for part in (weighting, clusters, val_size) if part)


def _line(key: dict, method: str, detail: str, by_seed: dict, first: dict) -> Line:
    rows = list(by_seed.values())
    values = [row.value for row in rows]
    mean = sum(values) / len(values)
    names = REFILLED.get(method, SKYLINES)
    skyline = next((first[s] for s in names if s in first), None)
    scored, multiple = None, None
    if skyline is not None and key["metric"] in ("mse", "accuracy"):
        scored = _recovery(by_seed, first.get("maml"), skyline) if method != "maml" else None
        if key["metric"] == "mse":
            multiple = mean / (sum(row.value for row in skyline.values()) / len(skyline))
    seconds = [row.seconds for row in rows if row.seconds is not None]
    published = key["experiment"] == "sinusoid" and key["metric"] == "mse"
    where = (key["shots"], key["ratio"], method)
    return Line(
        method=method,
        detail=detail,
        seeds=tuple(by_seed),
        mean=mean,
        ci95=_interval(rows),
        recovery=None if by_seed is skyline else scored,
        multiple=multiple,
        seconds=sum(seconds) / len(seconds) if seconds else None,
        paper=paper.sinusoid(*where) if published else None,
        paper_recovery=paper.sinusoid_recovery(*where) if published else None,
    )


def _recovery(method: dict, maml: dict | None, skyline: dict) -> Recovery | None:
    """Over the seeds that all three have."""
    seeds = [seed for seed in method if maml and seed in maml and seed in skyline]
    if not seeds or maml is None:
        return None
    chosen = [[by_seed[seed] for seed in seeds] for by_seed in (method, maml, skyline)]
    intervals = [[row.ci95 for row in rows] for rows in chosen]
    known = all(ci is not None and math.isfinite(ci) for line in intervals for ci in line)
    first, second, third = ([ci / 1.96 for ci in line] for line in intervals) if known else ([], [], [])
    errors = (first, second, third) if known else None
    values = [[row.value for row in rows] for rows in chosen]
    return recovery(values[0], values[1], values[2], errors=errors)


def _interval(rows: list[Row]) -> float:
    """Half of the 95 % interval of the mean over seeds, by Student's t; with one seed, the row's own."""
    n = len(rows)
    if n == 1:
        return math.nan if rows[0].ci95 is None else rows[0].ci95
    from scipy.special import stdtrit

    mean = sum(row.value for row in rows) / n
    variance = sum((row.value - mean) ** 2 for row in rows) / (n - 1)
    return float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n)
