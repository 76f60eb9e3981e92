"""The tidy results file: one row per method, cell, seed and metric.

A row is known by its key, which is every column but `value`, `ci95` and `seconds`. Rows are
appended whole, under a lock, and are on the disk when `Results.append` returns. A kill in the middle of a
write leaves at most one line without its end, which readers leave out and the next append cuts off.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not a POSIX system: one process at a time is then up to the caller
    fcntl = None  # type: ignore[assignment]

__all__ = ["COLUMNS", "Key", "Results", "Row", "atomic_write", "config_hash"]

Key = tuple[str, ...]

UNHASHED = frozenset({"out", "data_root", "jobs", "engine", "stack", "device", "threads"})  # change no number
_INTEGERS = frozenset({"shots", "clusters", "val_size", "iterations", "seed"})
_REALS = frozenset({"ratio", "value", "ci95", "seconds"})
_MEASURED = frozenset({"value", "ci95", "seconds"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One result. What does not apply is left empty: `""` for text, `None` for numbers."""

    experiment: str
    scale: str = ""
    method: str = ""
    weighting: str = ""
    shots: int | None = None
    ratio: float | None = None
    source: str = ""
    ood_source: str = ""
    clusters: int | None = None
    val_size: int | None = None
    variant: str = ""
    iterations: int | None = None
    seed: int | None = None
    metric: str
    value: float
    ci95: float | None = None
    seconds: float | None = None
    config: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as it is written: numbers with all their digits, empty where nothing applies."""
        return tuple(_text(name, getattr(self, name)) for name in COLUMNS)

    @property
    def key(self) -> Key:
        """What tells this row from every other."""
        return tuple(cell for name, cell in zip(COLUMNS, self.cells, strict=True) if name not in _MEASURED)


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


class Results:
    """`results.csv` in a folder, with the resolved options beside it in `configs/`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "results.csv"
        self._cache: tuple[tuple[int, int], list[Row], set[Key]] | None = None

    def read(self) -> list[Row]:
        """All rows, in the order they were written; none where there is no file yet."""
        return list(self._load()[0])

    def has(self, key: Key | Row) -> bool:
        """Whether a row with this key is there."""
        return (key.key if isinstance(key, Row) else key) in self._load()[1]

    def append(self, rows: Iterable[Row]) -> None:
        """Write rows at once. A key that is already there is an error, and then nothing is written."""
        rows = list(rows)
        lines = "".join(_line(row.cells) for row in rows)
        if not rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
            file.seek(0)
            data = file.read()
            known, whole = _parse(data, self.path)
            keys = {row.key for row in known}
            for row in rows:
                if row.key in keys:
                    raise FileExistsError(f"{self.path} already holds the row {_describe(row)}")
                keys.add(row.key)
            file.truncate(whole)
            try:
                file.write(((_line(COLUMNS) if whole == 0 else "") + lines).encode())
                _to_disk(file)
            except OSError:  # a full disk, say: none of these rows rather than some
                file.truncate(whole)
                raise

    def save_config(self, options: Mapping[str, Any]) -> str:
        """Write the options that can change a number to `configs/<hash>.json`; the hash, for `Row.config`."""
        name = config_hash(options)
        path = self.folder / "configs" / f"{name}.json"
        if not path.exists():
            text = json.dumps(_hashed(options), sort_keys=True, indent=1, default=_plain)
            atomic_write(path, text + "\n")
        return name

    def _load(self) -> tuple[list[Row], set[Key]]:
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                state = (stat.st_size, stat.st_mtime_ns)
                if self._cache is None or self._cache[0] != state:
                    rows, _ = _parse(file.read(), self.path)
                    self._cache = (state, rows, {row.key for row in rows})
        except FileNotFoundError:
            return [], set()
        return self._cache[1], self._cache[2]


def config_hash(options: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of the resolved options, less those that cannot change a number."""
    text = json.dumps(_hashed(options), sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that a reader, or a kill, meets the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            _to_disk(file)
        os.chmod(temporary, 0o644)  # mkstemp's own is for its owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _parse(data: bytes, path: Path) -> tuple[list[Row], int]:
    """The rows, and the length in bytes of what is whole: a last line without its end is not."""
    whole = data.rfind(b"\n") + 1
    try:
        if whole == 0:
            if not _line(COLUMNS).encode().startswith(data):
                raise ValueError("its first line is not the header")
            return [], 0
        header, *lines = data[:whole].decode("utf-8-sig").split("\n")[:-1]
        if _split(header) != list(COLUMNS):
            raise ValueError("its first line is not the header")
        rows = []
        for number, line in enumerate(lines, start=2):
            try:
                rows.append(_row(_split(line)))
            except (ValueError, csv.Error) as error:
                raise ValueError(f"line {number}: {error}") from None
        return rows, whole
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is not a results file of nestedmaml, or is damaged: {error}") from None


def _split(line: str) -> list[str]:
    return next(csv.reader([line.rstrip("\r")], strict=True), [])


def _row(cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} columns where there are {len(COLUMNS)}")
    values: dict[str, Any] = {}
    for name, cell in zip(COLUMNS, cells, strict=True):
        try:
            values[name] = _value(name, cell)
        except ValueError:
            raise ValueError(f"{cell!r} is not a number, in column {name!r}") from None
    return Row(**values)


def _value(name: str, cell: str) -> str | int | float | None:
    if name in _INTEGERS:
        return int(cell) if cell else None
    if name in _REALS:
        return float(cell) if cell or name == "value" else None
    return cell


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in _INTEGERS:
        return str(int(value))
    return repr(float(value)) if name in _REALS else str(value)


def _line(cells: Iterable[str]) -> str:
    cells = list(cells)
    if any(mark in cell for cell in cells for mark in "\n\r\0"):  # a line is what a kill can cut
        raise ValueError(f"results hold no line breaks, which are in {cells}")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _describe(row: Row) -> str:
    parts = zip(COLUMNS, row.cells, strict=True)
    return ", ".join(f"{name}={cell}" for name, cell in parts if cell and name not in _MEASURED)


def _hashed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in UNHASHED}


def _plain(value: Any) -> Any:
    """What JSON does not know: paths, and NumPy's or torch's numbers."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} cannot be written as an option")


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
