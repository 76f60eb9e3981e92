"""What a report says: the headline, and for every experiment its tables and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from nestedmaml._version import __version__
from nestedmaml.experiments.results import Results, Row
from nestedmaml.report import figures
from nestedmaml.report.cells import Cell, Line, cells, name, place
from nestedmaml.report.page import Figure, Page, Section
from nestedmaml.report.runs import Run, milliseconds, read_runs
from nestedmaml.report.tables import Entry, Table, number, tables

__all__ = ["contents", "headline"]

_HEROES = ("nested", "nested-weighted", "nested-fo", "nested-paper")
_TITLES = {
    "sinusoid": "Sinusoid regression",
    "ood": "Out-of-distribution tasks",
    "noise": "Noisy labels",
    "weights": "What the weights learn",
    "clusters": "How many clusters",
    "valsize": "How many validation tasks",
    "timing": "What it costs",
    "convergence": "Convergence",
}
_WEIGHTS = """
A weight says how much a task's query loss counts in the meta-gradient. It is learned: at every iteration the
meta-parameters take a trial step, and a weight falls where more of it would have raised the loss on a small
set of clean validation tasks. No weight ever sees whether its task is corrupt; where the figures tell clean
from corrupt, the truth was used only to draw them.

A low weight therefore says that a task did not help the validation tasks. It is evidence, not proof, that the
task is wrong: a clean task unlike any validation task can be weighed down, and a corrupt one that happens to
help can keep its weight. Weights are relative, so only their differences within one run mean something, and
where tasks share a weight (clusters) they are judged together.
"""


def contents(folder: Path) -> Page:
    """The page for a folder of results."""
    results = Results(folder)
    rows, runs = results.read(), read_runs(folder)
    if not rows and (results.path.exists() or not runs):
        raise ValueError(
            f"nothing to report: {results.path} " + ("is empty" if results.path.exists() else "is missing")
        )
    by_cell = cells(rows)
    sections = []
    for experiment in dict.fromkeys([*(row.experiment for row in rows), *(run.experiment for run in runs)]):
        mine = [cell for cell in by_cell if cell.key["experiment"] == experiment]
        own = [run for run in runs if run.experiment == experiment]
        sections.append(
            Section(
                title=_TITLES.get(experiment, experiment.capitalize()) or "Runs",
                tables=[*tables(mine), *_costs(own)],
                figures=_figures(own, mine),
            )
        )
    if any(run.clean or run.corrupt or "weight_mean" in run.history for run in runs):
        sections.append(Section("What a weight means", _WEIGHTS))
    title = "Learning from dirty tasks"
    return Page(title, headline(by_cell), sections, _protocol(folder, rows, runs))


def headline(by_cell: Sequence[Cell]) -> str:
    """The result in a sentence or two, with its numbers."""
    for hero in _HEROES:
        found = [(cell, line) for cell in by_cell if (line := cell.line(hero)) is not None and line.recovery]
        clear = [(cell, line) for cell, line in found if line.recovery and line.recovery.clear]
        if len(clear) == 1:
            return _one(*clear[0])
        if clear:
            values = [line.recovery.value for _, line in clear if line.recovery]
            return (
                f"{name(hero)} recovers a median of {median(values):.2f} of what corrupt data costs MAML, "
                f"over {len(clear)} settings ({min(values):.2f} to {max(values):.2f}; 0 is MAML, 1 is a "
                f"skyline that is told what is corrupt); it beats MAML in {_wins(clear)} of them."
            )
        if found:
            return (
                f"In none of {len(found)} settings do MAML and the skyline differ clearly, so that there is "
                f"little to recover; the tables give the differences."
            )
    methods = dict.fromkeys(name(line.method) for cell in by_cell for line in cell.lines)
    return f"Results of {', '.join(methods)}." if methods else "Runs without results so far."


def _one(cell: Cell, line: Line) -> str:
    metric, found, maml = str(cell.key["metric"]), line.recovery, cell.line("maml")
    sky = cell.line("maml-ood-rm-refill" if line.method == "nested-weighted" else "maml-ood-rm")
    ratio = cell.key["ratio"]
    share = f"With {ratio:.0%} of the training tasks corrupt, " if isinstance(ratio, float) else ""
    label = {"mse": "mean squared error", "accuracy": "accuracy"}.get(metric, metric)
    unit = " %" if metric == "accuracy" else ""
    others = [
        f"{number(other.mean, metric)}{unit} for {text}"
        for other, text in ((maml, "MAML"), (sky, "the skyline"))
        if other
    ]
    seeds = f"{len(line.seeds)} seed{'s' if len(line.seeds) != 1 else ''}"
    weighted = cell.line("nested-weighted") if line.method == "nested" else None
    more = ""
    if weighted is not None and weighted.recovery is not None and weighted.recovery.clear:
        more = (
            f" With weighted sampling it recovers {weighted.recovery} of the distance to a skyline that also "
            f"fills its batches with clean tasks ({label} {number(weighted.mean, metric)}{unit})."
        )
    return (
        f"{share}{name(line.method)} recovers {found} of what they cost MAML: {label} "
        f"{number(line.mean, metric)}{unit}, against {' and '.join(others)}, which is told which tasks are "
        f"corrupt ({seeds}).{more}"
    )


def _wins(found: Iterable[tuple[Cell, Line]]) -> int:
    return sum(line.recovery is not None and line.recovery.value > 0 for _, line in found)


def _costs(runs: list[Run]) -> list[Table]:
    """What each method costs, of the runs that say how many parameters they have."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: place(run.method)):
        if run.parameters is not None:
            groups.setdefault((run.method, run.weighting), {}).setdefault(json.dumps(run.cell), []).append(run)
    maml = {setting: milliseconds(same) for setting, same in groups.get(("maml", ""), {}).items()}
    lines = []
    for (method, weighting), settings in groups.items():
        size = max(run.parameters or 0 for same in settings.values() for run in same)
        times = {setting: ms for setting, same in settings.items() if (ms := milliseconds(same)) is not None}
        multiples = [ms / base for setting, ms in times.items() if (base := maml.get(setting))]
        line = [Entry(name(method), name(method), weighting), Entry(f"{size:,}", size), Entry(), Entry()]
        if times:
            ms = median(times.values())
            line[2] = Entry(number(ms), ms)
        if multiples:
            line[3] = Entry(f"{median(multiples):.2f}", median(multiples))
        lines.append(tuple(line))
    columns = ("Method", "Parameters", "Milliseconds an iteration", "× MAML")
    note = (
        "Parameters are all that is meta-learned, weights of tasks aside. Times are medians over a run's history, "
        "without its tests, and over settings; the multiple of MAML's is taken within each setting."
    )
    return [Table("What each method costs", "", columns, tuple(lines), note)] if lines else []


def _figures(runs: list[Run], by_cell: Sequence[Cell]) -> list[Figure]:
    metrics = {str(cell.key["metric"]) for cell in by_cell}
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: place(run.method)):
        setting = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in run.cell.items())
        groups.setdefault(setting, {}).setdefault(run.method, []).append(run)
    out = []
    for setting, methods in groups.items():
        where = f" ({setting})" if setting else ""
        out += _curves(methods, where, metrics)
        out += _weights(methods, where)
        panels = [
            figures.sine(fit, name(method))
            for method, same in methods.items()
            for run in same[:1]
            for fit in run.fits[:1]
        ]
        if panels:
            caption = f"A test task that no method has seen, fitted from its support points{where}."
            out.append(Figure(panels, caption, figures.SINE_LEGEND))
    return out


def _curves(methods: dict[str, list[Run]], where: str, metrics: set[str]) -> list[Figure]:
    for column, label in (("test", "test tasks"), ("val_loss", "validation loss")):
        runs = {method: _series(same, column) for method, same in methods.items()}
        runs = {method: curves for method, curves in runs.items() if curves}
        if runs:
            accuracy = column == "test" and "accuracy" in metrics
            ylabel = "accuracy, %" if accuracy else "mean squared error" if "mse" in metrics else "loss"
            caption = f"Learning curves on {label}{where}: the mean over seeds, in a band over their range."
            positive = all(v > 0 for curves in runs.values() for _, y in curves for v in y)
            return [Figure(figures.learning_curves(runs, ylabel, log=positive and not accuracy), caption)]
    return []


def _weights(methods: dict[str, list[Run]], where: str) -> list[Figure]:
    trends, ends = [], []
    for method, runs in methods.items():
        clean, corrupt = _series(runs, "weight_clean"), _series(runs, "weight_corrupt")
        if clean and corrupt:
            spreads = _series(runs, "weight_clean_sd"), _series(runs, "weight_corrupt_sd")
            trends.append(figures.weight_trend(clean, corrupt, *spreads, title=name(method)))
        if any(run.clean and run.corrupt for run in runs):
            both = [w for run in runs for w in run.clean], [w for run in runs for w in run.corrupt]
            ends.append(figures.weight_histogram(*both, title=name(method)))
    spread = "Bands: one standard deviation over tasks, or where that is not known the range over seeds."
    captions = (
        f"Mean weight of clean and of corrupt training tasks while they are learned{where}. {spread}",
        f"The weights at the end{where}, all seeds together; each kind is drawn to the same height.",
    )
    return [Figure(panels, text) for panels, text in zip((trends, ends), captions, strict=True) if panels]


def _series(runs: list[Run], column: str) -> list[tuple[list[float], list[float]]]:
    """One curve for each run that knows the column at all."""
    out = []
    for run in runs:
        points = [(x, y) for x, y in zip(run.history.get("iteration", []), run.history.get(column, []), strict=False)]
        points = [(x, y) for x, y in points if math.isfinite(y)]
        if points:
            out.append(([x for x, _ in points], [y for _, y in points]))
    return out


def _protocol(folder: Path, rows: list[Row], runs: list[Run]) -> dict[str, str]:
    """What was run, each in words; several values where runs differ."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for label in (
            "experiment",
            "scale",
            "iterations",
            "source",
            "ood_source",
            "shots",
            "ratio",
            "variant",
            "seed",
        ):
            value = getattr(row, label)
            if value not in (None, ""):
                found.setdefault(label.replace("_", " ").capitalize(), {})[str(value)] = None
    for run in runs:
        for label, text in run.protocol.items():
            found.setdefault(label, {})[text] = None
    options = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("configs/*.json"))]
    for label in sorted(set.intersection(*(set(option) for option in options)) if options else ()):
        values = {json.dumps(option[label]).strip('"') for option in options}
        words = label.replace("_", " ").capitalize()
        if len(values) == 1 and words not in found and (value := values.pop()) not in ("null", "", "[]", "{}"):
            found[words] = {value: None}
    return {label: ", ".join(values) for label, values in found.items()} | {"Reported by": f"nestedmaml {__version__}"}
