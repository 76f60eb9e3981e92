"""The command line. What it offers loads fast; what it runs is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from nestedmaml.experiments.options import Options

__all__ = ["main"]

T = TypeVar("T")

ABOUT = """nestedmaml: few-shot meta-learning from dirty tasks.

  nestedmaml demo                    learn from tasks of which 90 % are corrupt; ends with a report (minutes)
  nestedmaml reproduce EXPERIMENT    the paper's experiments: {experiments}
  nestedmaml report DIR              write DIR/report.html anew from DIR/results.csv

  nestedmaml COMMAND --help          the options of a command
  nestedmaml --version
"""

EXPERIMENTS = ("sinusoid", "convergence")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 2 where the user has to change something, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {"demo": demo, "reproduce": reproduce, "report": report}
    if not argv or argv[0] in ("-h", "--help"):
        print(ABOUT.format(experiments=", ".join(EXPERIMENTS)), end="")
        return 0
    if argv[0] == "--version":
        from nestedmaml import __version__

        print(f"nestedmaml {__version__}")
        return 0
    if argv[0] not in commands:
        return mistake(f"there is no command {argv[0]!r}; there are {', '.join(commands)}")
    try:
        return commands[argv[0]](argv[1:])
    except KeyboardInterrupt:
        print("stopped; --resume goes on from here", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError) as error:
        return mistake(str(error))


def mistake(sentence: str) -> int:
    """Say what is wrong."""
    print(f"nestedmaml: {sentence}", file=sys.stderr)
    return 2


def reproduce(argv: list[str]) -> int:
    """An experiment of the paper."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: nestedmaml reproduce EXPERIMENT [options], with EXPERIMENT one of {', '.join(EXPERIMENTS)};")
        print("nestedmaml reproduce EXPERIMENT --help lists its options")
        return 0
    if not argv or argv[0] not in EXPERIMENTS:
        found = f"there is no experiment {argv[0]!r}" if argv else "which experiment?"
        return mistake(f"{found}; there are {', '.join(EXPERIMENTS)}")
    if argv[0] == "convergence":
        from nestedmaml.experiments import convergence

        return convergence.main(argv[1:]) or 0
    options = parse(argv[1:], f"nestedmaml reproduce {argv[0]}")

    from nestedmaml import report as pages
    from nestedmaml.experiments import sinusoid
    from nestedmaml.experiments.execute import execute
    from nestedmaml.experiments.results import Results

    runs = sinusoid.plan(options)
    execute(runs, options.out, resume=options.resume, jobs=options.jobs)
    print(pages.table_text(Results(options.out).read()))
    print(f"\n{pages.build(options.out)}")
    return 0


def demo(argv: list[str]) -> int:
    """The demo: one cell of the sinusoid table, with its page."""
    from nestedmaml.experiments.demo import Demo, run

    run(cli_options(Demo, argv, "nestedmaml demo", Demo.__doc__ or ""))
    return 0


def report(argv: list[str]) -> int:
    """Write the page of a folder anew."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: nestedmaml report DIR")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    from nestedmaml import report as pages

    print(pages.build(Path(argv[0])))
    return 0


def parse(argv: list[str], prog: str) -> Options:
    """The options of an experiment, from the command line over those of a file."""
    from nestedmaml.experiments.options import Options, from_file

    options = cli_options(Options, argv, prog, "Options left out follow the scale and the methods' tuned defaults.")
    given = {a.split("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_") for a in argv if a[:2] == "--"}
    return from_file(options, given & {f.name for f in fields(Options)})


def cli_options(kind: type[T], argv: list[str], prog: str, about: str) -> T:
    """A dataclass from the command line; a bad option is one sentence and exit code 2."""
    import tyro

    return tyro.cli(kind, args=argv, prog=prog, description=about)
