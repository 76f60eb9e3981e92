"""The convergence theorem, tried: Theorem ``meta-validation-convergence`` on ridge-regularised regressions.

The theorem bounds min_t E ||grad_W||^2, where grad_W is the gradient, with respect to all M weights, of the mean
validation meta-loss over all N tasks at theta_W = theta - (eta / M) sum_i w_i g_i(theta). It promises O(1 / sqrt T):
a slope of -1/2 or steeper against T on log axes, each T with runs of its own.

Since grad_W has the factor eta, and eta = k / T, its square falls like 1 / T^2 even where nothing is learned. So it is
also divided by eta^2, and tried with an eta that does not shrink. The expectation is over the mini-batches: a mean over
many independent runs, taken before the minimum over t (that of one noisy run falls with T by luck alone).
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nestedmaml.experiments.results import Results, Row, atomic_write
from nestedmaml.experiments.ridge import POOL, Array, Problem, batches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SCALES", "SETTINGS", "Slope", "constants", "figure", "main", "rows", "run", "slopes"]

# ---------------------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The horizons T, each with runs of its own, and the number of runs that make an expectation."""

    horizons: tuple[int, ...]
    runs: int


SCALES = {
    "smoke": Scale(tuple(2**k for k in range(5, 9)), 16),
    "small": Scale(tuple(2**k for k in range(5, 16)), 64),
    "medium": Scale(tuple(2**k for k in range(5, 17)), 128),
    "paper": Scale(tuple(2**k for k in range(5, 18)), 256),
}
SHORTEST = 32  # the shortest horizon of all scales: there every setting has the same eta and gamma
TRAVEL = 8.0  # k of eta = min(1, k / T)

SETTINGS = {  # and how the figure names them
    "theorem": "theorem: η = k/T",
    "theorem, own sigma": "η = k/T, γ = 1/L",
    "eta as 1/sqrt(T), own sigma": "η ∝ 1/√T, γ = 1/L",
    "fixed eta": "fixed η, γ ∝ 1/√T",
}
NORMS = {  # and their column in the points
    "plain": "minimum",
    "divided by eta^2": "normalised",
    "plain, minimum of each run": "lowest",
}


def steps(setting: str, problem: Problem, horizon: int) -> tuple[float, float]:
    """Eta and gamma of a run over ``horizon`` iterations.

    gamma = min(1 / L, C / (sigma sqrt T)) always, with C = sigma sqrt(32) / L: the largest that meets the theorem's
    condition sigma sqrt(T) / C >= L for every T >= 32. ``own sigma`` reads sigma as the deviation at the run's own
    eta. Then it falls with eta, that condition fails for long runs, and gamma stays at 1 / L.
    """
    if setting.startswith("theorem"):
        eta = min(1.0, TRAVEL / horizon)
    elif setting.startswith("eta as 1/sqrt(T)"):
        eta = min(1.0, TRAVEL / math.sqrt(SHORTEST * horizon))
    else:
        eta = TRAVEL / SHORTEST
    c = problem.sigma * math.sqrt(SHORTEST) / problem.smoothness
    sigma = problem.deviation(eta) if setting.endswith("own sigma") else problem.sigma
    return eta, min(1 / problem.smoothness, c / (sigma * math.sqrt(horizon)))


@dataclass(frozen=True)
class Trace:
    """What runs over one horizon showed, for each setting: the first dimension."""

    squares: Array  # [settings, T + 1]: E ||grad_W||^2 over the runs, t = 0 ... T
    lowest: Array  # [settings, runs]: min over t of each run's own ||grad_W||^2
    furthest: Array  # [settings]: the largest ||theta|| of any run
    theta: Array  # [settings, runs, d], at T
    weights: Array  # [settings, runs, M], at T


def simulate(problem: Problem, eta: Array, gamma: Array, horizon: int, runs: int, seed: int) -> Trace:
    """NestedMAML with one free, unclamped weight per task, from uniform weights, on the same batches in every setting.

    Each iteration is eqs. ``online-equation``, ``online-equation-weight`` and ``model-update``.
    """
    rng = np.random.default_rng([seed, 1, horizon])
    eta, gamma = eta[:, None, None], gamma[:, None, None]
    theta = np.tile(problem.start, (len(eta), runs, 1))
    weights = np.ones((len(eta), runs, POOL))
    squares = np.empty((len(eta), horizon + 1))
    lowest, furthest = np.full((len(eta), runs), np.inf), np.zeros(len(eta))

    def measure(t: int) -> None:
        square = (problem.full_gradient(theta, weights, eta) ** 2).sum(-1)
        squares[:, t] = square.mean(1)
        np.minimum(lowest, square, out=lowest)
        np.maximum(furthest, np.linalg.norm(theta, axis=-1).max(1), out=furthest)

    for t, (index, chosen) in enumerate(batches(rng, horizon, runs)):
        measure(t)
        slope, grads = problem.weight_step(theta, weights, index, chosen, eta)
        at = np.broadcast_to(index, slope.shape)
        new = np.take_along_axis(weights, at, -1) - gamma * slope
        np.put_along_axis(weights, at, new, -1)
        theta = theta - eta * (new[..., None] * grads).mean(-2)
    measure(horizon)
    return Trace(squares, lowest, furthest, theta, weights)


def rows(scale: str, seed: int) -> list[dict[str, Any]]:
    """One point for each setting and horizon: the smallest expected squared norm, and what goes with it.

    ``bound`` is the proof's own for that eta and gamma, before its last step; ``inside`` says whether every run stayed
    in the ball for which rho holds; ``lowest`` is the mean of the runs' own minima.
    """
    problem, chosen = Problem.draw(seed), SCALES[scale]
    first_loss = problem.validation_loss(problem.start)
    slack = problem.bound**2 * (1 + problem.alpha * problem.smoothness) ** 2
    out = []
    for horizon in chosen.horizons:
        pairs = [steps(setting, problem, horizon) for setting in SETTINGS]
        eta, gamma = (np.array(values) for values in zip(*pairs, strict=True))
        trace = simulate(problem, eta, gamma, horizon, chosen.runs, seed)
        for i, setting in enumerate(SETTINGS):
            e, g, least = float(eta[i]), float(gamma[i]), float(trace.squares[i].min())
            means = trace.weights[i].mean(0)
            travelled = e * slack * (e * problem.smoothness + 2) * horizon
            out.append(
                {
                    "setting": setting,
                    "seed": seed,
                    "T": horizon,
                    "eta": e,
                    "gamma": g,
                    "minimum": least,
                    "normalised": least / e**2,
                    "at": int(trace.squares[i].argmin()),
                    "last": float(trace.squares[i, -1]),
                    "lowest": float(trace.lowest[i].mean()),
                    "bound": (2 * first_loss + travelled) / (g * horizon),
                    "inside": int(trace.furthest[i] <= problem.radius),
                    "clean_weight": float(means[~problem.corrupt].mean()),
                    "corrupt_weight": float(means[problem.corrupt].mean()),
                }
            )
    return out


def constants(seed: int) -> dict[str, float]:
    """The constants of the problem of a seed, as its docstrings explain them."""
    problem = Problem.draw(seed)
    return {
        "L": problem.smoothness,
        "mu": problem.convexity,
        "alpha": problem.alpha,
        "radius": problem.radius,
        "rho": problem.bound,
        "sigma": problem.sigma,
        "C": problem.sigma * math.sqrt(SHORTEST) / problem.smoothness,
        "k": TRAVEL,
    }


# ---------------------------------------------------------------------------------------------------------
# The slopes
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A least-squares slope of log(minimum) against log T, over the horizons from ``since`` on."""

    setting: str
    norm: str
    since: int
    value: float
    ci95: float | None  # half the bootstrap interval over seeds; none of one seed
    intercept: float

    @property
    def variant(self) -> str:
        """How `results.csv` names it."""
        return f"{self.setting}, norm {self.norm}, T >= {self.since}"


def slopes(points: Sequence[Mapping[str, Any]], since: int = 0, resamples: int = 4000) -> list[Slope]:
    """One slope for each setting and norm: of the seeds' mean, with a bootstrap interval over seeds."""
    horizons = sorted({int(point["T"]) for point in points if point["T"] >= since})
    seeds = sorted({int(point["seed"]) for point in points})
    if len(horizons) < 2:
        raise ValueError(f"a slope needs at least two horizons, got {horizons}")
    x = np.log(horizons) - np.log(horizons).mean()
    found = []
    for setting in SETTINGS:
        for norm, column in NORMS.items():
            y = np.log(_table([p for p in points if p["T"] >= since], setting, column)[1])
            each = y @ x / (x @ x)
            half = None
            if len(seeds) > 1:
                drawn = np.random.default_rng(0).integers(len(seeds), size=(resamples, len(seeds)))
                low, high = np.percentile(each[drawn].mean(1), [2.5, 97.5])
                half = float(high - low) / 2
            mean = float(each.mean())
            intercept = float(y.mean() - mean * np.log(horizons).mean())
            found.append(Slope(setting, norm, horizons[0], mean, half, intercept))
    return found


def late(points: Sequence[Mapping[str, Any]]) -> int:
    """Where the longer half of the horizons begins."""
    horizons = sorted({int(point["T"]) for point in points})
    return horizons[len(horizons) // 2]


# ---------------------------------------------------------------------------------------------------------
# The figure
# ---------------------------------------------------------------------------------------------------------

_COLOURS = dict(zip(SETTINGS, ("#2f86c9", "#8a6fd1", "#12966b", "#dd6b20"), strict=True))
_GREY, _INK = "#8b929c", "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nestedmaml",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}


def figure(points: Sequence[Mapping[str, Any]], png: Path | None = None) -> str:
    """The minima against T on log axes with their fitted lines, as SVG text whose ink is the page's; also as a PNG.

    Relative to T = 32, where all settings are the same, so that the seeds' problems share one scale.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from PIL import Image

    with matplotlib.rc_context(_STYLE):
        if png is not None:
            drawn = Figure(figsize=(9.6, 4.4), layout="constrained", facecolor="white")
            FigureCanvasAgg(drawn)
            _draw(drawn, points)
            pixels = io.BytesIO()
            drawn.savefig(pixels, format="png", dpi=150)
            Image.open(pixels).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(png, optimize=True)
        drawn = Figure(figsize=(9.6, 4.4), layout="constrained")
        FigureCanvasSVG(drawn)
        _draw(drawn, points)
        out = io.StringIO()
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue()[out.getvalue().index("<svg") :], flags=re.S)
    return svg.replace(_INK, "currentColor")


def _draw(drawn: Figure, points: Sequence[Mapping[str, Any]]) -> None:
    left, right = drawn.subplots(1, 2)
    fits = list(zip(slopes(points), slopes(points, late(points)), strict=True))
    _panel(left, points, [pair for pair in fits if pair[0].norm == "plain"], "The theorem's norm, min E‖∇w‖²")
    _panel(right, points, [pair for pair in fits if pair[0].norm == "divided by eta^2"], "The same divided by η²")


def _panel(axes: Axes, points: Sequence[Mapping[str, Any]], fits: Sequence[tuple[Slope, Slope]], title: str) -> None:
    """One norm: dots for the seeds' mean, faint lines for seeds, a dotted fit of all horizons, one of the late."""
    from matplotlib.ticker import NullFormatter

    ends = []
    for fit, after in fits:
        colour = _COLOURS[fit.setting]
        horizons, values = _table(points, fit.setting, NORMS[fit.norm])
        relative = values / values[:, :1]
        mean = np.exp(np.log(relative).mean(0))
        if len(relative) > 1:
            axes.plot(horizons, relative.T, color=colour, alpha=0.25, linewidth=0.7, zorder=1)
        axes.plot(horizons, mean, linestyle="", marker="o", markersize=4.2, markeredgewidth=0, color=colour, zorder=4)
        for each, style in ((fit, {"linewidth": 0.9, "alpha": 0.7, "linestyle": (0, (1, 1.5))}), (after, {})):
            kept = horizons >= each.since
            centre, level = (np.exp(np.log(part[kept]).mean()) for part in (horizons, mean))
            line = level * (horizons[kept] / centre) ** each.value
            look: dict[str, Any] = {"linewidth": 1.7, **style}
            axes.plot(horizons[kept], line, color=colour, zorder=2, **look)
        label = f"{SETTINGS[fit.setting]}\nslope {_signed(fit)}\nT ≥ {after.since:,}: {_signed(after)}"
        ends.append((float(mean[-1]), label, colour))
    if fits[0][0].norm == "plain":
        promise = (horizons / horizons[0]) ** -0.5
        axes.plot(horizons, promise, color=_GREY, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        ends.append((float(promise[-1]), "promised\nslope −0.50", _GREY))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = horizons[:: max(1, math.ceil(len(horizons) / 4))]
    axes.set_xticks(shown, [f"{value:,}" for value in shown.astype(int)])
    axes.set_xlabel("iterations T")
    axes.set_ylabel("relative to T = 32")
    axes.set_ylim(min(0.1, axes.get_ylim()[0]), 2)
    axes.yaxis.set_major_formatter(_power)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=_GREY, alpha=0.22, linewidth=0.6)
    axes.set_title(title, loc="left", fontsize=9.5, weight="bold", pad=8)
    _label(axes, float(horizons[-1]), ends)


def _table(points: Sequence[Mapping[str, Any]], setting: str, column: str) -> tuple[Array, Array]:
    """Horizons, and the values ``[seeds, horizons]`` of one column."""
    value = {(int(p["seed"]), int(p["T"])): float(p[column]) for p in points if p["setting"] == setting}
    seeds, horizons = (sorted({key[i] for key in value}) for i in (0, 1))
    return np.array(horizons, dtype=float), np.array([[value[seed, t] for t in horizons] for seed in seeds])


def _signed(slope: Slope) -> str:
    ci = "" if slope.ci95 is None else f" ± {slope.ci95:.2f}"
    return f"{round(slope.value, 2) + 0.0:.2f}{ci}".replace("-", "−")  # + 0.0: no negative zero


def _power(value: float, _: Any = None) -> str:
    if 0.01 <= value <= 100:
        return f"{value:g}"
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _label(axes: Axes, x: float, ends: Sequence[tuple[float, str, str]]) -> None:
    """Some lines of text at the end of each line, moved apart where they would touch."""
    drawn = axes.figure
    drawn.canvas.draw()
    scale = 72 / drawn.get_dpi()
    own = [axes.transData.transform((x, y))[1] * scale for y, _, _ in ends]
    order = sorted(range(len(ends)), key=lambda i: own[i])
    place, gap = list(own), 38.0
    for _ in range(200):
        for below, above in pairwise(order):
            overlap = gap - (place[above] - place[below])
            if overlap > 0:
                place[below] -= overlap / 2
                place[above] += overlap / 2
    low = axes.transAxes.transform((0, 0))[1] * scale + 14
    for i in order:
        place[i] = max(place[i], low)
        low = place[i] + gap
    for i, (y, label, colour) in enumerate(ends):
        axes.annotate(
            label,
            (x, y),
            (18, place[i] - own[i]),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.2,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
        )


# ---------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------


def run(out: Path, seeds: Sequence[int], scale: str, say: Callable[[str], None] = lambda line: None) -> list[Slope]:
    """Write ``results.csv``, ``points.csv``, ``convergence.svg`` and ``convergence.png`` into ``out``.

    Raises FileExistsError before anything is run where these slopes are there already.
    """
    chosen = SCALES[scale]
    seeds = sorted(set(seeds))
    results = Results(out)
    options = {
        "experiment": "convergence",
        "scale": scale,
        "seeds": seeds,
        "horizons": chosen.horizons,
        "runs": chosen.runs,
        "constants": {str(seed): constants(seed) for seed in seeds},
    }
    config = results.save_config(options)
    if any(row.experiment == "convergence" and row.config == config for row in results.read()):
        raise FileExistsError(f"{results.path} already holds the slopes of these seeds at scale {scale}")
    began = time.perf_counter()
    points = []
    for seed in seeds:
        points += rows(scale, seed)
        say(f"seed {seed}: {time.perf_counter() - began:.0f} s")
    seconds = time.perf_counter() - began
    found = slopes(points) + slopes(points, late(points))
    atomic_write(out / "points.csv", points_csv(points))
    atomic_write(out / "convergence.svg", figure(points, out / "convergence.png"))
    results.append(
        Row(experiment="convergence", scale=scale, method="nested-paper", weighting="task", variant=slope.variant,
            iterations=chosen.horizons[-1], metric="slope", value=slope.value, ci95=slope.ci95, seconds=seconds,
            config=config)
        for slope in found
    )  # fmt: skip
    return found


def points_csv(points: Sequence[Mapping[str, Any]]) -> str:
    """The points as CSV, numbers with all their digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(points[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(points)
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m nestedmaml.experiments.convergence``."""
    parser = argparse.ArgumentParser(
        prog="nestedmaml reproduce convergence", description="The convergence theorem, tried."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="each a problem of its own")
    parser.add_argument("--scale", choices=list(SCALES), default="smoke", help="how many steps")
    given = parser.parse_args(argv)
    if min(given.seeds) < 0:
        parser.error(f"seeds are integers >= 0, got {min(given.seeds)}")
    try:
        found = run(given.out, given.seeds, given.scale, say=lambda line: print(line, file=sys.stderr))
    except (FileExistsError, NotADirectoryError) as error:
        parser.error(str(error))
    for slope in found:
        ci = "" if slope.ci95 is None else f" ± {slope.ci95:.3f}"
        print(f"{slope.variant:<76} {slope.value:7.3f}{ci}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
