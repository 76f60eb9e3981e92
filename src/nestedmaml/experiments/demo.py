"""The demo: MAML, the skylines and NestedMAML on sines among nine times as many lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nestedmaml.experiments.options import Options

__all__ = ["Demo", "run"]

METHODS = ("maml-ood-rm", "maml-ood-rm-refill", "maml", "nested-fo", "nested", "nested-weighted")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Learn from tasks of which 90 % are corrupt, beside MAML and what could be reached by knowing which."""

    iterations: int = 2_000
    """Meta-iterations of each method."""
    ratio: float = 0.9
    """Share of corrupt tasks."""
    seed: int = 0
    """Seed of everything."""
    out: Path = Path("runs/demo")
    """Folder of results.csv and report.html; what is in it already is not run again."""


def run(demo: Demo) -> Path:
    """Train all methods one after the other, print the table, and write the page."""
    from nestedmaml import report
    from nestedmaml.experiments.execute import execute
    from nestedmaml.experiments.results import Results
    from nestedmaml.experiments.sinusoid import plan

    options = Options(
        shots=(10,), ratio=(demo.ratio,), seeds=(demo.seed,), iterations=demo.iterations, methods=METHODS,
        out=demo.out, resume=True,
    )  # fmt: skip
    print(
        f"10,000 tasks, {demo.ratio:.0%} of them lines where sines are wanted, and 100 clean validation tasks; "
        f"{len(METHODS)} methods of {demo.iterations} iterations each. The first run compiles for half a minute."
    )
    execute(plan(options), options.out, resume=True, jobs=1)
    print(report.table_text(Results(options.out).read()))
    page = report.build(options.out)
    print(f"\nThe report: {page}")
    return page
