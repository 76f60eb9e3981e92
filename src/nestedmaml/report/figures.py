"""Figures as SVG text that takes its ink and its font from the page it stands in.

Drawn through `Figure` objects, so no state of pyplot's is touched; the same data gives the same bytes.
Colours are mid-tones of the Okabe-Ito palette, which read on white and on black and for colour-blind eyes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nestedmaml.report.cells import name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SINE_LEGEND", "Curve", "learning_curves", "sine", "weight_histogram", "weight_trend"]

Curve = tuple[ArrayLike, ArrayLike]  # iterations and values of one seed

CLEAN, CORRUPT = "#2f86c9", "#dd6b20"
GREY = "#8b929c"
COLOURS = {
    "maml": "#8b929c",
    "maml-ood-rm": "#12966b",
    "maml-ood-rm-refill": "#12966b",
    "maml-noise-rm": "#12966b",
    "maml-noise-rm-support": "#12966b",
    "nested": "#2f86c9",
    "nested-fo": "#5fb3dd",
    "nested-weighted": "#dd6b20",
    "nested-paper": "#8a6fd1",
    "l2r": "#c2528b",
    "maml-val": "#b3952b",
    "maml-both": "#a4704c",
}
SINE_LEGEND = (
    ("truth", "currentColor"),
    ("support points", CORRUPT),
    ("before", GREY),
    ("after adaptation", CLEAN),
)
_DASHED = {"maml-ood-rm-refill", "maml-noise-rm-support"}
_OTHERS = ["#c2528b", "#b3952b", "#8a6fd1", "#a4704c", "#5fb3dd", "#d2483f"]
_INK = "#010203"  # becomes currentColor
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nestedmaml",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "ytick.minor.size": 0,
}


def learning_curves(runs: Mapping[str, Sequence[Curve]], ylabel: str = "", log: bool = False) -> str:
    """One line for each method, the mean over its seeds, in a band over their range."""

    def draw(axes: Axes) -> None:
        others = iter(_OTHERS * len(runs))
        ends = []
        for method, curves in runs.items():
            x, mean, low, high = _over_seeds(curves)
            colour = COLOURS.get(method) or next(others)
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(x, mean, color=colour, linewidth=1.8, linestyle="--" if method in _DASHED else "-")
            ends.append((x, mean, name(method), colour))
        if log:
            axes.set_yscale("log")
            _plain_log_ticks(axes)
        _iterations(axes)
        axes.set_ylabel(ylabel)
        axes.grid(axis="y", color=GREY, alpha=0.22, linewidth=0.6)
        _label_ends(axes, ends)

    return _svg(draw, (6.4, 3.5))


def weight_trend(
    clean: Sequence[Curve],
    corrupt: Sequence[Curve],
    clean_sd: Sequence[Curve] = (),
    corrupt_sd: Sequence[Curve] = (),
    title: str = "",
) -> str:
    """Mean weight of clean and of corrupt tasks over time, one curve a seed; the bands are one spread."""

    def draw(axes: Axes) -> None:
        ends = []
        for label, colour, curves, spreads in (
            ("clean", CLEAN, clean, clean_sd),
            ("corrupt", CORRUPT, corrupt, corrupt_sd),
        ):
            x, mean, low, high = _over_seeds(curves)
            if len(spreads):
                _, spread, _, _ = _over_seeds(spreads)
                low, high = np.maximum(mean - spread, 0), mean + spread
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(x, mean, color=colour, linewidth=1.8)
            ends.append((x, mean, label, colour))
        _iterations(axes, ticks=3)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("weight")
        axes.grid(axis="y", color=GREY, alpha=0.22, linewidth=0.6)
        axes.set_title(title, loc="left", fontsize=9.5, weight="bold", pad=6)
        _label_ends(axes, ends)

    return _svg(draw, (3.4, 2.4))


def weight_histogram(clean: ArrayLike, corrupt: ArrayLike, title: str = "") -> str:
    """How the weights of clean and of corrupt tasks are spread, each drawn to the same height."""
    kinds = {"clean": np.asarray(clean, dtype=float), "corrupt": np.asarray(corrupt, dtype=float)}
    everything = np.concatenate([*kinds.values()])
    low, high = min(0.0, float(everything.min())), float(everything.max())
    bins = np.linspace(low, high if high > low else low + 1.0, 49)

    def draw(axes: Axes) -> None:
        for row, ((label, values), colour) in enumerate(zip(kinds.items(), (CLEAN, CORRUPT), strict=True)):
            counts = np.histogram(values, bins)[0]
            base = 1.25 * row
            height = base + counts / max(1, counts.max())
            axes.stairs(height, bins, baseline=base, fill=True, color=colour, alpha=0.3, linewidth=0)
            axes.stairs(height, bins, baseline=base, color=colour, linewidth=1.3)
            axes.text(
                -0.02,
                base,
                label,
                color=colour,
                weight="bold",
                ha="right",
                transform=axes.get_yaxis_transform(),
            )
        axes.set_ylim(0, 2.35)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(x=0)
        axes.set_xlabel("weight")
        axes.set_title(title, loc="left", fontsize=9.5, weight="bold", pad=6)

    return _svg(draw, (3.4, 2.0))


def sine(fit: Mapping[str, ArrayLike], title: str = "") -> str:
    """One small panel: the true function, the support points, the prediction before and after adaptation.

    What is what stands in `SINE_LEGEND`, once for all panels.
    """

    def draw(axes: Axes) -> None:
        x = np.asarray(fit["x"], dtype=float).ravel()
        order = np.argsort(x)
        values = {key: np.asarray(fit[key], dtype=float).ravel()[order] for key in ("truth", "before", "after")}
        x = x[order]
        axes.axhline(0, color=GREY, linewidth=0.5, alpha=0.5)
        axes.plot(x, values["truth"], color=_INK, linewidth=1.0)
        axes.plot(x, values["before"], color=GREY, linewidth=1.2, linestyle=(0, (2, 2)))
        axes.plot(x, values["after"], color=CLEAN, linewidth=1.9)
        axes.plot(
            np.ravel(fit["support_x"]),
            np.ravel(fit["support_y"]),
            linestyle="",
            marker="o",
            markersize=4.2,
            markeredgewidth=0,
            color=CORRUPT,
            zorder=4,
        )
        reach = 1.25 * max(1.0, *(float(np.abs(v).max()) for v in (values["truth"], np.ravel(fit["support_y"]))))
        axes.set_ylim(-reach, reach)  # the truth sets the scale, so that a wild prediction leaves the panel
        axes.set_xticks([-5, 0, 5])
        axes.locator_params(axis="y", nbins=3)
        axes.set_title(title, loc="left", fontsize=9.5, weight="bold", pad=6)

    return _svg(draw, (3.3, 2.3))


def _svg(draw: Callable[[Axes], None], size: tuple[float, float]) -> str:
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(out.getvalue())


def _for_a_page(svg: str) -> str:
    """Less all that points outside or names the whole figure; ink, font and size are the page's."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r' (?:xmlns:xlink|width|height|version)="[^"]*"', "", svg[: (end := svg.index(">"))]) + svg[end:]
    svg = svg.replace("xlink:href", "href").replace(_INK, "currentColor")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font: (?:(bold|\d00) )?([\d.]+)px [^;\"]*", _font, svg)  # older matplotlib; newer:
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    return re.sub(r"\n\s*", "\n", svg)


def _font(match: re.Match[str]) -> str:
    weight = "; font-weight: 600" if match[1] else ""
    return f"font-size: {match[2]}px{weight}"


def _over_seeds(curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Mean and range at the iterations of any seed, over the seeds that reach it; gaps are bridged."""
    series = []
    for x, y in curves:
        x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        keep = np.isfinite(y)
        if keep.any():
            series.append((x[keep], y[keep]))
    if not series:
        return tuple(np.empty((4, 0)))  # type: ignore[return-value]
    grid = np.unique(np.concatenate([x for x, _ in series]))
    at = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in series])
    return grid, np.nanmean(at, axis=0), np.nanmin(at, axis=0), np.nanmax(at, axis=0)


def _iterations(axes: Axes, ticks: int = 6) -> None:
    axes.set_xlabel("iteration")
    axes.margins(x=0)
    axes.locator_params(axis="x", nbins=ticks)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def _plain_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(axes: Axes, ends: Sequence[tuple[NDArray[Any], NDArray[Any], str, str]]) -> None:
    """A label at the end of each line, pushed apart where two would touch, joined to its line by a hair."""
    ends = [end for end in ends if end[1].size]
    if not ends:
        return
    figure = axes.figure
    figure.canvas.draw()
    to_points = 72 / figure.get_dpi()
    places = [axes.transData.transform((x[-1], y[-1]))[1] * to_points for x, y, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: places[i])
    wanted = list(places)
    gap = 12.5
    for _ in range(100):  # relax: neighbours that overlap move apart by equal shares
        for below, above in pairwise(order):
            overlap = gap - (wanted[above] - wanted[below])
            if overlap > 1e-3:
                wanted[below] -= overlap / 2
                wanted[above] += overlap / 2
    bottom = axes.transAxes.transform((0, 0))[1] * to_points
    lift = max(0.0, bottom + 3 - min(wanted))
    for i, (x, y, label, colour) in enumerate(ends):
        shift = wanted[i] + lift - places[i]
        axes.annotate(
            label,
            (x[-1], y[-1]),
            (14, shift),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold",
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 2},
        )
