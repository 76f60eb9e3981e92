"""What runs left in their folders: `runs/<name>/{history.csv, weights.csv, run.json}`, where there."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["Run", "milliseconds", "read_runs"]


@dataclass
class Run:
    """One run; numbers that are not known are NaN."""

    name: str
    experiment: str = ""
    method: str = ""
    weighting: str = ""
    parameters: int | None = None  # that are meta-learned
    seed: int | None = None
    cell: dict[str, Any] = field(default_factory=dict)
    fits: list[dict[str, list[float]]] = field(default_factory=list)
    protocol: dict[str, str] = field(default_factory=dict)  # what else was run, in words
    history: dict[str, list[float]] = field(default_factory=dict)  # by column
    clean: list[float] = field(default_factory=list)  # weights at the end, where the truth is known
    corrupt: list[float] = field(default_factory=list)


def read_runs(folder: Path) -> list[Run]:
    """All runs of a results folder, by name. A damaged file is a `ValueError` that names it."""
    return [_read(path) for path in sorted(folder.glob("runs/*")) if path.is_dir()]


def _read(folder: Path) -> Run:
    run = Run(folder.name, method=folder.name)
    if (path := folder / "run.json").exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            run.experiment, run.method, run.seed = (
                str(found["experiment"]),
                str(found["method"]),
                found["seed"],
            )
            run.weighting = str(found.get("weighting") or "")
            run.parameters = None if found.get("parameters") is None else int(found["parameters"])
            run.cell = dict(found.get("cell") or {})
            run.fits = list(found.get("fits") or [])
            run.protocol = {str(key): str(value) for key, value in (found.get("protocol") or {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not describe a run: {error!r}") from None
    if (path := folder / "history.csv").exists():
        rows = _columns(path, "iteration")
        run.history = {column: [_number(path, cell) for cell in cells] for column, cells in rows.items()}
    if (path := folder / "weights.csv").exists():
        rows = _columns(path, "weight")
        for weight, corrupt in zip(rows["weight"], rows.get("corrupt", []), strict=False):
            if corrupt:
                kind = run.corrupt if corrupt.lower() in ("1", "true", "1.0") else run.clean
                kind.append(_number(path, weight))
    return run


def milliseconds(runs: Sequence[Run]) -> float | None:
    """Of one iteration: the median over the rows of the runs' histories, since the first may compile."""
    seconds = [s for run in runs for s in run.history.get("seconds", []) if math.isfinite(s)]
    return 1000 * median(seconds) if seconds else None


def _columns(path: Path, needed: str) -> dict[str, list[str]]:
    """A CSV file by column; a last line that a kill cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines(), strict=True))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not lines:
        return {needed: []}
    header, *rows = lines
    if needed not in header or any(len(row) != len(header) for row in rows):
        raise ValueError(f"{path} is damaged: it needs a column {needed!r} and lines as long as its header")
    return {column: [row[i] for row in rows] for i, column in enumerate(header)}


def _number(path: Path, cell: str) -> float:
    try:
        return float(cell) if cell else math.nan
    except ValueError:
        raise ValueError(f"{path} is damaged: {cell!r} is not a number") from None
