"""A model as the planner sees it: names and shapes of parameters, wherever they come from."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn

from ..choice import chosen_parameters
from ..ownership import blocks_of
from ..recognition import structures_of
from ..selection import Predicate, candidates
from ..structure import PLAIN, Structure

_EXPERTS = re.compile(r"(^|\.)experts\.")
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(.+)")


class PlanError(ValueError):
    """Something that the user has asked for cannot be planned; the message says what to change."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        name: fully qualified.
        shape: of the whole tensor.
        dedicated: whether Muon gets it.
        block: the repeated block of the model that it is in; None outside of all.
        trainable: whether it has a gradient.
        structure: which matrices it holds.
    """

    name: str
    shape: tuple[int, ...]
    dedicated: bool
    block: str | None
    trainable: bool = True
    structure: Structure = PLAIN

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, which FSDP2 and expert parallelism leave whole."""
        return self.dedicated and self.structure.stacked(self.shape) > 0

    @property
    def is_expert(self) -> bool:
        """Whether not every token comes to it."""
        return _EXPERTS.search(self.name) is not None


@dataclass(frozen=True)
class Model:
    """Parameters in module order, a tied one once.

    Attributes:
        name: what the user has called it.
        params: all of them.
        notes: what the user should know about how they were read.
        active: of the experts of a layer, the part that a token comes to.
    """

    name: str
    params: tuple[Parameter, ...]
    notes: tuple[str, ...] = ()
    active: float = 1.0

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(param.numel for param in self.params)

    @property
    def dedicated(self) -> list[Parameter]:
        """The matrices that Muon gets."""
        return [param for param in self.params if param.dedicated]

    @property
    def base(self) -> list[Parameter]:
        """All others."""
        return [param for param in self.params if not param.dedicated]

    def with_stacks(self) -> Model:
        """Experts that are a matrix each as one stack for each layer and kind."""
        found: dict[str, Parameter] = {}
        counts: Counter[str] = Counter()
        for param in self.params:
            match = _EXPERT.match(param.name)
            name = f"{match[1]}.{match[2]}" if match and len(param.shape) == 2 else param.name
            counts[name] += 1
            if name != param.name:
                param = replace(param, name=name, shape=(counts[name], *param.shape))
            found[name] = param
        return replace(self, params=tuple(found.values()))


def from_names(name: str, shapes: Iterable[tuple[str, Sequence[int]]], notes: Sequence[str] = ()) -> Model:
    """A model of which only names and shapes are known.

    Dedicated are matrices called "...weight" inside a repeated block, that is below a name with a number in
    it, such as `layers.0`. At run time `dedicate_params` looks at modules instead, and may choose matrices
    outside of blocks, too, that are no head. Of three dims, those below a name "experts" are stacks.
    """
    params = []
    for full_name, shape in shapes:
        block = _block(full_name)
        is_matrix = len(shape) == 2 and min(shape) > 1 and full_name.endswith("weight")
        is_matrix |= len(shape) == 3 and min(shape[1:]) > 1 and _EXPERTS.search(full_name) is not None
        params.append(Parameter(full_name, tuple(shape), is_matrix and block is not None, block))
    return Model(name, tuple(params), tuple(notes))


def _block(name: str) -> str | None:
    """The part of a name up to its first number: "h.3.mlp.weight" is in "h.3"."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.rpartition("_")[2].isdigit():
            return ".".join(parts[: index + 1])
    return None


def from_module(module: nn.Module, name: str = "model", predicate: Predicate | None = None) -> Model:
    """A model as `dedicate_params` would find it: the very code that chooses at run time.

    Its groups are its repeated blocks, as where `fully_shard` wraps each of these.

    Raises:
        ValueError: if nothing is chosen, as `dedicate_params`.
    """
    everything = candidates(module)
    blocks = blocks_of(module, everything)
    structures = structures_of(chosen_parameters(module, predicate), None, module)
    chosen = {id(candidate.param): structure for candidate, structure in structures.items()}
    return Model(
        name,
        tuple(
            Parameter(
                c.name,
                tuple(c.param.shape),
                id(c.param) in chosen,
                block,
                c.param.requires_grad,
                chosen.get(id(c.param), PLAIN),
            )
            for c, block in zip(everything, blocks, strict=True)
        ),
    )


def from_function(text: str) -> Model:
    """The model that `module:function` returns, built on the meta device. The current directory is searched.

    Raises:
        PlanError: if there is no such function, or it returns something else.
    """
    module_name, _, attributes = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: object = importlib.import_module(module_name)
    except ImportError as error:
        raise PlanError(f"--model {text}: cannot import {module_name}: {error}") from error
    for attribute in attributes.split("."):
        if not hasattr(function, attribute):
            raise PlanError(f"--model {text}: {module_name} has no {attributes}")
        function = getattr(function, attribute)
    if not callable(function):
        raise PlanError(f"--model {text}: {attributes} cannot be called")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise PlanError(f"--model {text} returns a {type(model).__name__}; a torch.nn.Module is needed")
    try:
        return from_module(model, text)
    except ValueError as error:
        raise PlanError(f"--model {text}: {error}") from error


def choose_by_pattern(model: Model, include: Sequence[str], exclude: Sequence[str]) -> Model:
    """Change what is dedicated: regular expressions searched in names; `exclude` wins.

    Raises:
        PlanError: for a pattern that is none or that matches nothing, or for something chosen that is not a
            matrix.
    """
    params = list(model.params)
    for patterns, dedicated in ((include, True), (exclude, False)):
        for pattern in patterns:
            try:
                found = [i for i, param in enumerate(params) if re.search(pattern, param.name)]
            except re.error as error:
                raise PlanError(f"{pattern!r} is not a regular expression: {error}") from error
            if not found:
                raise PlanError(f"{pattern!r} matches no parameter of {model.name}")
            for index in found:
                if dedicated and len(params[index].shape) != 2:
                    raise PlanError(f"{params[index].name} has shape {params[index].shape}: not a matrix")
                params[index] = replace(params[index], dedicated=dedicated)
    return replace(model, params=tuple(params))
