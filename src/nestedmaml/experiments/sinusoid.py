"""The paper's sinusoid table: shots by ratio of corrupt tasks, and the curves of its figure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nestedmaml.experiments.options import Options
from nestedmaml.experiments.presets import preset, rule
from nestedmaml.experiments.results import Row

if TYPE_CHECKING:
    from nestedmaml.learner import Learner

__all__ = ["METHODS", "Run", "plan"]

METHODS = ("maml-ood-rm", "maml", "maml-val", "l2r", "nested", "nested-paper")
SHOTS, RATIOS = (5, 10, 20), (0.3, 0.5, 0.8, 0.9)
ITERATIONS = {"smoke": 20, "small": 5_000, "medium": 5_000, "paper": 60_000}
TEST_TASKS = {"smoke": 20, "small": 1_000, "medium": 1_000, "paper": 1_000}
GRID = (1e-4, 1e-3, 1e-2, 1e-1)  # the paper's, for each step size
TEST_SEED = 2**20  # test tasks are the same for all seeds, methods and ratios
DEFAULTS: dict[str, Any] = {"inner_lr": 0.01, "inner_steps": 5, "test_steps": 10, "meta_lr": 1e-3}


@dataclass(frozen=True)
class Run:
    """One method, in one cell, with one seed."""

    options: Options
    method: str
    shots: int
    ratio: float
    seed: int
    weighting: str
    tuning: bool = False

    @property
    def iterations(self) -> int:
        """The number of iterations, which no method may differ in."""
        return self.options.iterations or ITERATIONS[self.options.scale]

    @property
    def experiment(self) -> str:
        """The experiment's name in the results."""
        return "sinusoid-tune" if self.tuning else "sinusoid"

    @property
    def learner_options(self) -> dict[str, Any]:
        """The learner's options, resolved, but for the rule and the loss."""
        o, p = self.options, preset(self.method)
        out = {**DEFAULTS, **p.options, "seed": self.seed}
        for name in ("inner_lr", "inner_steps", "test_steps", "meta_lr"):
            if getattr(o, name) is not None:
                out[name] = getattr(o, name)
        if p.nested:
            for name in ("val_steps", "weight_lr", "val_share"):
                if getattr(o, name) is not None and not (name == "val_share" and self.method == "nested-paper"):
                    out[name] = getattr(o, name)
        return out

    @property
    def config(self) -> dict[str, Any]:
        """All that can change this run's numbers."""
        o = self.options
        return {
            "experiment": self.experiment,
            "method": self.method,
            "learner": preset(self.method).learner,
            "weighting": self.weighting,
            "clusters": o.clusters if self.weighting == "cluster" else None,
            "iterations": self.iterations,
            "shots": self.shots,
            "ratio": self.ratio,
            "pool": o.pool,
            "val_size": o.val_size,
            "batch": o.batch,
            "val_batch": o.val_batch,
            "test_tasks": TEST_TASKS[o.scale],
            "decay": o.decay,
            "compile": o.compile,
            "seed": self.seed,
            **{k: v for k, v in self.learner_options.items() if k != "seed"},
        }

    @property
    def row(self) -> Row:
        """The row to be filled; all but its value is known before the run."""
        o = self.options
        return Row(
            experiment=self.experiment, scale=o.scale, method=self.method, weighting=self.weighting, shots=self.shots,
            ratio=self.ratio, source="sinusoid", ood_source="lines",
            clusters=o.clusters if self.weighting == "cluster" else None, val_size=o.val_size, variant=self.variant,
            iterations=self.iterations, seed=self.seed, metric="mse", value=float("nan"),
        )  # fmt: skip

    @property
    def variant(self) -> str:
        """What else was changed from the defaults, in words."""
        o, base = self.options, Options()
        names = ("pool", "batch", "val_batch", "decay", "inner_lr", "inner_steps", "test_steps", "meta_lr")
        own = ("val_steps", "weight_lr", "val_share") if preset(self.method).nested else ()
        return ", ".join(f"{n}={getattr(o, n)}" for n in (*names, *own) if getattr(o, n) != getattr(base, n))

    @property
    def name(self) -> str:
        """The run's folder."""
        parts = [self.method, self.weighting, f"k{self.shots}", f"r{self.ratio:g}", f"s{self.seed}"]
        return "-".join(part for part in (*parts, self.variant.replace(", ", "-").replace("=", "")) if part)

    def sources(self) -> dict[str, Any]:
        """The pools: training, validation, and fresh test tasks that are the same for every run."""
        from nestedmaml.tasks import Sinusoid

        o = self.options
        # what is chosen is chosen on validation tasks that train nothing; test tasks choose nothing
        split: Literal["val", "test"] = "val" if self.tuning else "test"
        return {
            "train": Sinusoid(self.shots, ratio=self.ratio, size=o.pool, seed=self.seed),
            "val": Sinusoid(self.shots, size=o.val_size, seed=self.seed, split="val"),
            "test": Sinusoid(self.shots, size=None, seed=TEST_SEED, split=split),
        }

    def learner(self) -> Learner:
        """The untrained learner."""
        import nestedmaml as nm

        p, options = preset(self.method), self.learner_options
        if self.weighting:
            options["weighting"] = rule(self.weighting, self.options.clusters, paper=self.method == "nested-paper")
        model = nm.models.mlp((1, 40, 40, 1), seed=self.seed)
        return getattr(nm, p.learner)(model, loss=nm.losses.squared_error, **options)

    def __call__(self, folder: Path) -> list[Row]:
        """Train, evaluate, and leave the run's files in ``folder``."""
        from nestedmaml.experiments.execute import train_and_score

        return train_and_score(self, folder)


def plan(options: Options) -> list[Run]:
    """All runs, those that share what is compiled after each other."""
    if options.tune:
        return tuning(options)
    cells = itertools.product(options.shots or SHOTS, options.ratio or RATIOS, options.seeds)
    runs = []
    for shots, ratio, seed in cells:
        for method in options.methods or METHODS:
            nested = preset(method).nested
            for weighting in (options.weighting or (preset(method).weighting,)) if nested else ("",):
                runs.append(Run(options, method, shots, ratio, seed, weighting))
    return list(dict.fromkeys(runs))  # a seed that is asked for twice is one run


def tuning(options: Options) -> list[Run]:
    """The same trials for each method: the paper's grid for alpha and eta, in one cell, with the first seed."""
    shots, ratio = (options.shots or (10,))[0], (options.ratio or (0.9,))[0]
    return [
        Run(replace(options, inner_lr=a, meta_lr=e), m, shots, ratio, options.seeds[0], preset(m).weighting, True)
        for m, a, e in itertools.product(dict.fromkeys(options.methods or METHODS), GRID, GRID)
    ]
