"""One self-contained HTML page: whatever it shows is inside it, and no address leads out of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nestedmaml.experiments.results import atomic_write
from nestedmaml.report.tables import Table

__all__ = ["Figure", "Page", "Section", "render", "write"]


@dataclass(frozen=True)
class Figure:
    """A drawing, or several that are laid out side by side, from `nestedmaml.report.figures`."""

    svg: str | Sequence[str]
    caption: str = ""
    legend: Sequence[tuple[str, str]] = ()  # label and colour, where the drawing does not name its parts

    @property
    def panels(self) -> list[str]:
        """The drawings; inside a page they need no namespace."""
        panels = [self.svg] if isinstance(self.svg, str) else self.svg
        return [re.sub(r' xmlns="[^"]*"', "", panel, count=1) for panel in panels]


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs (parted by empty lines), tables and figures."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()

    @property
    def paragraphs(self) -> list[str]:
        """The text by paragraph."""
        return [part.strip() for part in self.text.split("\n\n") if part.strip()]


@dataclass(frozen=True)
class Page:
    """What `render` makes into HTML. All text is text: nothing in it is read as HTML."""

    title: str
    lead: str
    sections: Sequence[Section] = ()
    protocol: Mapping[str, str] = field(default_factory=dict)  # what exactly was run


def render(page: Page) -> str:
    """The page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("nestedmaml.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(page=page)


def write(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all."""
    path = Path(path)
    atomic_write(path, render(page))
    return path
