"""The command line. What it offers loads fast; what it runs is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
        asked = bool(argv) and argv[0] in ("-h", "--help")
        print("usage: nestedmaml report DIR", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    from nestedmaml import report as pages

    print(pages.build(Path(argv[0])))
    return 0


def parse(argv: list[str], prog: str) -> Options:
    """The options of an experiment, from the command line over those of a file."""
    from nestedmaml.experiments.options import Options, file_arguments

    about = "Options left out follow the scale and the methods' tuned defaults."
    options = cli_options(Options, argv, prog, about)
    if options.config is None:
        return options
    words = (a.split("=")[0] for a in argv if a.startswith("--"))
    given = {word.removeprefix("--no-").removeprefix("--").replace("-", "_") for word in words}
    arguments = file_arguments(options.config, given)
    try:
        return cli_options(Options, [*arguments, *argv], prog, about)
    except ValueError as error:  # the command line alone was fine
        raise ValueError(f"{options.config}: {error}") from None


def cli_options(kind: type[T], argv: list[str], prog: str, about: str) -> T:
    """A dataclass from the command line; a bad option is a ValueError of one sentence."""
    import contextlib
    import io
    import re

    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=argv, prog=prog, description=about, config=(tyro.conf.DisallowNone,))
    except SystemExit as end:
        if not end.code:
            raise
    # a box: its title, what is wrong, a rule, where to find help
    lines = [line.strip("│ ") for line in said.getvalue().splitlines()[1:]]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─╰╯")]
    sentence = " ".join(line for line in lines[: rules[0] if rules else None] if line).rstrip(".")
    sentence = sentence.removeprefix("Error parsing ").removeprefix(f"{kind.__name__}: ")
    sentence = re.sub(r"^(--[\w-]+): .*?(\['.*?'\]|'.*?').*", r"\1: cannot read \2", sentence)
    raise ValueError(f"{sentence or 'the options are wrong'}; {prog} --help lists the options")
