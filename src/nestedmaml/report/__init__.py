"""From results to what people read: a table for the terminal, one HTML page for everything else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nestedmaml.experiments.results import Row

__all__ = ["build", "table_text"]


def build(folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` from a folder's `results.csv` and `runs/`; what is missing is left out."""
    from nestedmaml.report.contents import contents
    from nestedmaml.report.page import write

    folder = Path(folder)
    return write(contents(folder), folder / "report.html")


def table_text(rows: Iterable[Row]) -> str:
    """The tables of the report as plain text, aligned, with the methods' names on the command line."""
    from nestedmaml.report.cells import cells
    from nestedmaml.report.tables import tables

    return "\n\n".join(table.text() for table in tables(cells(rows), str))
