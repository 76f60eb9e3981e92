"""The options of `nestedmaml reproduce`, and how they resolve: command line over file over scale."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

__all__ = ["Options", "file_arguments"]

Scale = Literal["smoke", "small", "medium", "paper"]


WEIGHTINGS = ("task", "cluster", "amortised")


def default(words: str, metavar: str | None = None) -> Any:
    """What the help says of an option that is left out."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {words})", metavar=metavar)


Tuned = default("the method's")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an experiment. What is left out follows the scale and the method's tuned defaults."""

    scale: Scale = "small"
    """smoke: seconds, for tests. small: two cores. medium: one GPU. paper: the paper's own setting."""
    iterations: Annotated[int | None, default("the scale's")] = None
    """Meta-iterations of each run, the same for every method."""
    shots: Annotated[tuple[int, ...] | None, default("the paper's", "INT ...")] = None
    """Support (and in regression query) points of a task, K. Any values, not only the paper's."""
    ratio: Annotated[tuple[float, ...] | None, default("the paper's", "FLOAT ...")] = None
    """Share of corrupt tasks in the training pool."""
    methods: Annotated[tuple[str, ...] | None, default("the paper's, and baselines", "NAME ...")] = None
    """Methods by name; an unknown one lists the known."""
    weighting: Annotated[tuple[str, ...] | None, default("the method's", "NAME ...")] = None
    """Weighting rules of the nested methods, each in turn: task, cluster, amortised."""
    clusters: int = 200
    """Clusters of the cluster rule."""
    pool: int = 10_000
    """Training tasks in the pool, M."""
    val_size: int = 100
    """Clean validation tasks, N."""
    seeds: Annotated[tuple[int, ...], default("0 1 2", "INT ...")] = (0, 1, 2)
    """Seeds; every one draws its own pool and its own initialisation."""
    batch: int = 25
    """Training tasks an iteration, m."""
    val_batch: int = 25
    """Validation tasks an iteration, n."""
    inner_lr: Annotated[float | None, Tuned] = None
    """Step size of the inner loop, alpha."""
    inner_steps: Annotated[int | None, Tuned] = None
    """Inner steps while training."""
    val_steps: Annotated[int | None, Tuned] = None
    """Inner steps of the validation adaptation."""
    test_steps: Annotated[int | None, Tuned] = None
    """Inner steps at test time."""
    meta_lr: Annotated[float | None, Tuned] = None
    """Step size of the meta-parameters, eta."""
    decay: bool = False
    """Let the meta-optimizer's step size fall to zero over the run, as a cosine; for every method alike."""
    weight_lr: Annotated[float | None, Tuned] = None
    """Step size of the weights, gamma."""
    val_share: Annotated[float | None, Tuned] = None
    """Share of the meta-step that the validation gradient has, for the nested methods; nested-paper keeps 0."""
    config: Annotated[Path | None, default("none")] = None
    """A TOML file of options; the command line goes before it."""
    out: Path = Path("runs")
    """Folder for results.csv, the runs, and report.html."""
    resume: bool = False
    """Go on: rows that are there already are not run again."""
    jobs: int = 1
    """Runs at a time, each a process."""
    threads: int = 1
    """Threads of each run."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, mps."""
    tune: bool = False
    """Try the paper's grid of step sizes for each method in one cell, scored on validation tasks kept for that."""
    compile: Annotated[Literal["auto", "yes", "no"], tyro.conf.arg(name="compile")] = "auto"
    """Compile the gradients with torch.compile; auto does when a run is long enough to gain."""

    def __post_init__(self) -> None:
        whole = (
            *((n, getattr(self, n)) for n in ("iterations", "clusters", "pool", "val_size", "batch", "val_batch")),
            *((n, getattr(self, n)) for n in ("jobs", "threads")),
            *(("shots", k) for k in self.shots or ()),
        )
        for name, value in whole:
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for r in self.ratio or ():
            if not 0 <= r < 1:
                raise ValueError(f"--ratio must be in [0, 1), got {r}")
        for name in ("inner_lr", "meta_lr", "weight_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a number above 0, got {value}")
        for name in ("inner_steps", "val_steps", "test_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
        if self.val_share is not None and not 0 <= self.val_share <= 1:
            raise ValueError(f"--val-share must be in [0, 1], got {self.val_share}")
        for name in ("shots", "ratio", "methods", "weighting", "seeds"):
            if getattr(self, name) == ():
                raise ValueError(f"--{name} needs at least one value")
        for name in self.weighting or ():
            if name not in WEIGHTINGS:
                raise ValueError(f"there is no weighting rule {name!r}; there are {', '.join(WEIGHTINGS)}")


def file_arguments(path: Path, given: set[str]) -> list[str]:
    """What a TOML file of options says, as arguments; ``given`` are the options that go before it."""
    import tomllib

    try:
        values: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no configuration file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    known = {f.name: f.default for f in dataclasses.fields(Options) if f.name != "config"}
    arguments: list[str] = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"{path} has an unknown option {key!r}; known are {', '.join(known)}")
        if isinstance(known[name], bool) is not isinstance(value, bool):
            wanted = "true or false" if isinstance(known[name], bool) else "a value, not true or false"
            raise ValueError(f"{path}: {key} must be {wanted}, got {value!r}")
        if name in given:
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return arguments
