"""The options of `nestedmaml reproduce`, and how they resolve: command line over file over scale."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

__all__ = ["Options", "from_file"]

Scale = Literal["smoke", "small", "medium", "paper"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an experiment. What is left out follows the scale and the method's tuned defaults."""

    scale: Scale = "small"
    """smoke: seconds, for tests. small: two cores. medium: one GPU. paper: the paper's own setting."""
    iterations: int | None = None
    """Meta-iterations of each run, the same for every method."""
    shots: tuple[int, ...] | None = None
    """Support (and in regression query) points of a task, K. Any values, not only the paper's."""
    ratio: tuple[float, ...] | None = None
    """Share of corrupt tasks in the training pool."""
    methods: tuple[str, ...] | None = None
    """Methods by name; an unknown one lists the known."""
    weighting: tuple[Literal["task", "cluster", "amortised"], ...] | None = None
    """Weighting rules of the nested methods, each in turn; by default their own."""
    clusters: int = 200
    """Clusters of the cluster rule."""
    pool: int = 10_000
    """Training tasks in the pool, M."""
    val_size: int = 100
    """Clean validation tasks, N."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; every one draws its own pool and its own initialisation."""
    batch: int = 25
    """Training tasks an iteration, m."""
    val_batch: int = 25
    """Validation tasks an iteration, n."""
    inner_lr: float | None = None
    """alpha."""
    inner_steps: int | None = None
    """Inner steps while training."""
    val_steps: int | None = None
    """Inner steps of the validation adaptation."""
    test_steps: int | None = None
    """Inner steps at test time."""
    meta_lr: float | None = None
    """eta."""
    weight_lr: float | None = None
    """gamma."""
    val_share: float | None = None
    """Share of the meta-step that the validation gradient has, for the nested methods; nested-paper keeps 0."""
    config: Path | None = None
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
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if not self.seeds:
            raise ValueError("--seeds needs at least one seed")


def from_file(options: Options, given: set[str]) -> Options:
    """``options`` with what its ``config`` file says, except where the command line said otherwise."""
    if options.config is None:
        return options
    import tomllib

    try:
        values: dict[str, Any] = tomllib.loads(options.config.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no configuration file {options.config}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{options.config} is not TOML: {error}") from None
    fields = {f.name: f for f in dataclasses.fields(Options)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise ValueError(f"{options.config} has no known option {key!r}; known are {', '.join(fields)}")
        if name in given:
            continue
        value = tuple(value) if isinstance(value, list) else value
        changes[name] = Path(str(value)) if name == "out" else value
    try:
        return dataclasses.replace(options, **changes)
    except TypeError as error:
        raise ValueError(f"{options.config}: {error}") from None
