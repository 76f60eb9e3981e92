"""Runs on disk: tensors as safetensors, everything else as JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1

__all__ = ["CheckpointError", "read", "write"]


class CheckpointError(ValueError):
    """A folder that is no checkpoint, or a damaged one."""


def write(folder: str | Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Write a checkpoint beside ``folder``, then put it in its place, so that a whole one is always there."""
    from safetensors.torch import save_file

    folder = Path(folder)
    new = folder.with_name(f"{folder.name}.new")
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, new / "tensors.safetensors")
    (new / "meta.json").write_text(json.dumps({"format": FORMAT, **meta}, indent=1, allow_nan=True), "utf-8")
    for path in new.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    new.rename(folder)
    if old.exists():
        shutil.rmtree(old)
    return folder


def read(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the rest of a checkpoint; the one before where a kill came between two renames."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    if not folder.exists() and (old := folder.with_name(f"{folder.name}.old")).exists():
        folder = old
    if not (folder / "meta.json").is_file() or not (folder / "tensors.safetensors").is_file():
        raise CheckpointError(f"{folder} holds no checkpoint: it needs meta.json and tensors.safetensors")
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'meta.json'} is damaged: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise CheckpointError(f"{folder} has checkpoint format {found!r}; this version reads format {FORMAT}")
    try:
        return load_file(folder / "tensors.safetensors"), meta
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder / 'tensors.safetensors'} is damaged: {error}") from None


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a tree of dicts, by path."""
    out: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            out[f"{prefix}{key}"] = value
    return out


def unflatten(tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """The tree below ``prefix``."""
    out: dict[str, Any] = {}
    for path, value in tensors.items():
        if path.startswith(f"{prefix}/"):
            *parents, leaf = path[len(prefix) + 1 :].split("/")
            node = out
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return out
