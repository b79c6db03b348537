"""Models on disk, as Hugging Face writes them: config.json, or the headers of safetensors files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from .architectures import from_config
from .model import Model, PlanError, from_names

_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes; the format allows no more


def from_path(path: Path) -> Model:
    """A directory or a file. Of a directory, its safetensors files say more than its config.json, and count.

    Raises:
        PlanError: if nothing there can be read.
    """
    name = str(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.is_file():
        raise PlanError(f"there is no file {name}")
    if path.name.endswith(".index.json"):
        return _from_tensors(name, _indexed(path))
    if path.suffix == ".safetensors":
        return _from_tensors(name, read_header(path))
    if path.suffix == ".json":
        return from_config(name, _json(path))
    raise PlanError(f"{name} is neither a .json nor a .safetensors file")


def _from_directory(path: Path) -> Model:
    if (path / _INDEX).is_file():
        return _from_tensors(str(path), _indexed(path / _INDEX))
    files = sorted(path.glob("*.safetensors"))
    if files:
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes.update(read_header(file))
        return _from_tensors(str(path), shapes)
    if (path / "config.json").is_file():
        return from_config(str(path), _json(path / "config.json"))
    raise PlanError(f"{path} has neither safetensors files nor a config.json")


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a safetensors file, in the order in which they lie there.

    The file starts with 8 bytes, the length of the header as a little-endian number; then the header, JSON:
    an entry for each tensor, with dtype, shape and data_offsets, and perhaps one called __metadata__.

    Raises:
        PlanError: if it is no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, os.fstat(file.fileno()).st_size - 8):
                raise PlanError(f"{path} is not a safetensors file")
            entries = json.loads(file.read(length))
        tensors = [(entry["data_offsets"][0], name, entry["shape"]) for name, entry in _tensors(entries)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path} is not a safetensors file: {error}") from error
    return {name: tuple(shape) for _, name, shape in sorted(tensors)}


def _tensors(entries: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, entry) for name, entry in entries.items() if name != "__metadata__"]


def _indexed(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of all files that an index names, in its order."""
    index = _json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise PlanError(f"{path} has no weight_map")
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(weight_map.values())):
        found.update(read_header(path.parent / file))
    missing = [name for name in weight_map if name not in found]
    if missing:
        raise PlanError(f"{path} has {missing[0]} in {weight_map[missing[0]]}, which has no such tensor")
    return {name: found[name] for name in sorted(weight_map, key=_natural)}


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _from_tensors(name: str, shapes: dict[str, tuple[int, ...]]) -> Model:
    notes = ["read from safetensors headers: all tensors are taken for trainable parameters, none for tied"]
    model = from_names(name, shapes.items(), notes)
    others = [param.name for param in model.base if len(param.shape) == 3]
    if others:
        notes.append(f"{len(others)} tensors have three dims ({others[0]}, for one): these are AdamW's")
    return replace(model, notes=tuple(notes))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path} has no JSON object")
    return content
