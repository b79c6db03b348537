"""What hooks need: to stay out of compiled graphs, and to find the tensors in what a module gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that `torch.compile` calls instead of compiling it, before and after the module's own graph."""
    return torch.compiler.disable(hook, recursive=True)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in an output, however nested: mappings, sequences, dataclasses and plain objects."""
    stack, seen = [output], set()
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
            stack.extend(vars(value).values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # with __slots__
            stack.extend(getattr(value, field.name) for field in dataclasses.fields(value))
