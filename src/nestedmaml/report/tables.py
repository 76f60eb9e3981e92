"""From cells to tables, for the page and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from nestedmaml.report import paper
from nestedmaml.report.cells import CELL, TOLD, Cell, Line, name

__all__ = ["Entry", "Table", "number", "tables"]

_METRICS = {
    "mse": "Mean squared error",
    "accuracy": "Accuracy, %",
    "auroc": "AUROC of the weights",
    "slope": "Slope",
    "seconds_ratio": "Ratio of seconds",
}


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table."""

    text: str = ""
    sort: float | str | None = None
    small: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table to print; `groups` gives the rows at which something new begins."""

    title: str
    setting: str  # what all its cells share
    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    note: str = ""
    groups: frozenset[int] = frozenset()

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which are aligned to the left."""
        return any(isinstance(row[column].sort, str) for row in self.rows)

    def spread(self, column: int) -> int:
        """The widest small print of a column of numbers, which is kept free so that the numbers line up."""
        return 0 if self.is_text(column) else max((len(row[column].small) for row in self.rows), default=0)

    def text(self) -> str:
        """The table for a terminal."""
        body = [[self._plain(entry, i) for i, entry in enumerate(row)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *body, strict=True)]
        left = [self.is_text(i) for i in range(len(self.columns))]

        def line(parts: Sequence[str]) -> str:
            spaced = zip(parts, widths, left, strict=True)
            return "  ".join(p.ljust(w) if words else p.rjust(w) for p, w, words in spaced).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        out = [self.title, *([self.setting] if self.setting else []), rule, line(self.columns), rule]
        for i, parts in enumerate(body):
            out += [rule] * (i in self.groups) + [line(parts)]
        return "\n".join([*out, rule])

    def _plain(self, entry: Entry, column: int) -> str:
        if width := self.spread(column):
            return f"{entry.text} {entry.small:<{width}}"
        return f"{entry.text} {entry.small}".strip()


def number(value: float | None, metric: str = "mse") -> str:
    """A number to three digits, a percentage to one decimal."""
    if value is None or math.isnan(value):
        return ""
    if metric == "accuracy":
        return f"{value:.1f}"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:#.3g}"


def tables(cells: Sequence[Cell], naming: Callable[[str], str] = name) -> list[Table]:
    """One table for each experiment, scale and metric, whose cells differ in shots, ratio and the like."""
    fixed = ("experiment", "scale", "metric")
    parts = groupby(cells, lambda cell: [cell.key[part] for part in fixed])
    return [_table([*part], naming) for _, part in parts]


def _table(part: list[Cell], naming: Callable[[str], str]) -> Table:
    metric = str(part[0].key["metric"])
    same = {key: part[0].key[key] for key in CELL if len({cell.key[key] for cell in part}) == 1}
    varying = [key for key in CELL if key not in same]
    lines = [line for cell in part for line in cell.lines]
    details = {line.detail for line in lines if line.detail or line.method.startswith("nested")}
    show = {
        "detail": len(details - {""}) > 0 and len(details) > 1,  # otherwise once, above the table
        "recovery": any(line.recovery for line in lines),
        "multiple": any(line.multiple is not None for line in lines),
        "paper": any(line.paper is not None for line in lines),
        "seconds": any(line.seconds is not None for line in lines),
    }
    unit = {"mse": "MSE", "auroc": "AUROC"}.get(metric, _METRICS.get(metric, metric))
    columns = [key.replace("_", " ").capitalize() for key in varying] + ["Method"]
    columns += ["Seeds", unit] + ["Recovery"] * show["recovery"]
    columns += ["× skyline"] * show["multiple"] + ["MSE / K", "paper (recovery)"] * show["paper"]
    columns += ["Seconds"] * show["seconds"]

    out: list[tuple[Entry, ...]] = []
    groups = set()
    for cell in part:
        groups.add(len(out))
        best = _best(cell, metric)
        out += [
            tuple(
                [_setting(cell.key[key]) for key in varying]
                + _entries(cell, line, naming(line.method), metric, show, line is best)
            )
            for line in cell.lines
        ]
    fixed = [
        f"{key.replace('_', ' ')} {same[key]}" for key in CELL if key != "metric" and same.get(key) not in (None, "")
    ]
    if len(details) == 1 and "" not in details:
        fixed.append(f"learned weights: {details.pop()}")
    title = _METRICS.get(metric, metric)
    notes = ["Intervals are 95 %: of the mean over seeds, or with one seed over its test tasks."]
    if show["recovery"]:
        notes.append(
            "Recovery is (method − MAML) / (skyline − MAML): 0 is MAML, 1 the skyline, which is told the "
            "truth. "
            "NestedMAML with weighted sampling is scored against the refilled skyline. Where MAML and the "
            "skyline do not differ clearly, the difference to MAML stands instead."
        )
    if show["paper"]:
        notes.append(paper.NOTE)
    return Table(title, ", ".join(fixed), tuple(columns), tuple(out), " ".join(notes), frozenset(groups - {0}))


def _best(cell: Cell, metric: str) -> Line | None:
    """The best of those that are not told which tasks are corrupt."""
    lines = [line for line in cell.lines if line.method not in TOLD and not math.isnan(line.mean)]
    if len(lines) < 2 or metric not in ("mse", "accuracy"):
        return None
    return (min if metric == "mse" else max)(lines, key=lambda line: line.mean)


def _setting(value: str | int | float | None) -> Entry:
    if isinstance(value, str) or value is None:
        return Entry(value or "", value or "")
    return Entry(f"{value:g}" if isinstance(value, float) else str(value), value)


def _entries(cell: Cell, line: Line, label: str, metric: str, show: dict[str, bool], best: bool) -> list[Entry]:
    told = line.method in TOLD
    spread = "" if math.isnan(line.ci95) else f"± {line.ci95:#.2g}"
    out = [Entry(label, label, "skyline" if told else line.detail if show["detail"] else "", best)]
    out.append(Entry(str(len(line.seeds)), len(line.seeds)))
    out.append(Entry(number(line.mean, metric) or "—", line.mean, spread, best))
    if show["recovery"]:
        out.append(_recovered(line))
    if show["multiple"]:
        out.append(_plain(line.multiple, "{:.2f}"))
    if show["paper"]:
        shots = cell.key["shots"]
        scaled = line.mean / shots if isinstance(shots, int) and line.paper is not None else None
        out += [_plain(scaled, "{:.4f}"), _published(line)]
    if show["seconds"]:
        out.append(_plain(line.seconds, "{:,.0f}" if (line.seconds or 0) >= 100 else "{:.3g}"))
    return out


def _recovered(line: Line) -> Entry:
    found = line.recovery
    if found is None:
        return Entry()
    if not found.clear:
        spread = "" if math.isnan(found.difference_error) else f"± {1.96 * found.difference_error:#.2g} "
        return Entry(f"{found.difference:+.3g}", None, f"{spread}against MAML; the gap is not clear")
    interval = "" if math.isnan(found.low) else f"[{found.low:.2f}, {found.high:.2f}]"
    return Entry(f"{found.value:.2f}", found.value, interval)


def _plain(value: float | None, form: str) -> Entry:
    return Entry() if value is None else Entry(form.format(value), value)


def _published(line: Line) -> Entry:
    if line.paper is None:
        return Entry()
    return Entry(f"{line.paper:.4f}", line.paper, "" if line.paper_recovery is None else f"({line.paper_recovery:.2f})")
