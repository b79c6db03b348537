"""Where a model comes from: the registry, a function, or files."""

from __future__ import annotations

from pathlib import Path

from .files import from_path
from .model import Model, from_function
from .registry import CONFIGS, from_registry


def load(text: str) -> Model:
    """A model by what the user has written: a name of the registry, a path, or `module:function`.

    Raises:
        PlanError: if it is none of these.
    """
    if text in CONFIGS:
        return from_registry(text)
    path = Path(text)
    if path.exists() or path.suffix in (".json", ".safetensors"):
        return from_path(path)
    if ":" in text:
        return from_function(text)
    return from_registry(text)
