"""Which matrices the parameters of known libraries hold: fused projections, orientation, stacks of experts.

Decided from the classes of transformers, timm and torch, whose layouts are read off their forward. A class of
one's own is not recognised by its names: `dedicate_params(..., structure=...)` says it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn as nn

from .selection import Candidate
from .structure import PLAIN, Structure

StructureOf = Callable[[str, nn.Parameter, nn.Module], Structure | None]
StructureSpec = Mapping[str, Structure] | StructureOf

_LIBRARIES = ("transformers.", "timm.")


def structures_of(
    chosen: Sequence[Candidate], spec: StructureSpec | None, model: nn.Module
) -> dict[Candidate, Structure]:
    """What each parameter holds: as `spec` says, else as recognised.

    Raises:
        TypeError: for a `spec` of another type.
        ValueError: for sizes that do not add up, by name; for a pattern that no parameter has; for a
            convolution that is no matrix.
    """
    said = _said(spec)
    modules = dict(model.named_modules())
    found = {}
    for candidate in chosen:
        structure = said(candidate.name, candidate.param, candidate.module)
        if structure is None:
            structure = recognise(candidate, modules) or PLAIN
        elif not isinstance(structure, Structure):
            raise TypeError(f"structure must give a dmuon.Structure for {candidate.name}, not {structure!r}")
        structure.check(candidate.name, candidate.param.shape)
        found[candidate] = structure
    if isinstance(spec, Mapping):
        for pattern in spec:
            if not any(fnmatch.fnmatchcase(candidate.name, pattern) for candidate in chosen):
                raise ValueError(f"structure: no dedicated parameter has a name like {pattern!r}")
    return found


def _said(spec: StructureSpec | None) -> StructureOf:
    if spec is None:
        return lambda name, param, module: None
    if isinstance(spec, Mapping):
        patterns = dict(spec)
        return lambda name, param, module: next(
            (structure for pattern, structure in patterns.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    if callable(spec):
        return spec
    raise TypeError(
        f"structure must be a dict of name patterns or a function (name, parameter, module), got {spec!r}"
    )


def recognise(candidate: Candidate, modules: Mapping[str, nn.Module]) -> Structure | None:
    """The structure of a parameter of a known class; None for any other.

    modules: of the model, by path.

    Raises:
        ValueError: for a convolution whose weight is no matrix of outputs by inputs.
    """
    module, param = candidate.module, candidate.param
    if isinstance(module, nn.modules.conv._ConvNd):
        if module.transposed or param.shape[1] == 1:
            kind = "transposed" if module.transposed else "depthwise"
            raise ValueError(f"{candidate.name} is of a {kind} convolution; leave it to AdamW")
        return Structure(kernel=param.ndim - 2)
    if isinstance(module, nn.MultiheadAttention) and candidate.attribute == "in_proj_weight":
        return Structure(sizes=(param.shape[0] // 3,) * 3)
    if param.ndim == 3 and _is_of(module, _LIBRARIES):
        return _experts(candidate)
    path, _, _ = candidate.path.rpartition(".")
    around, _, name = path.rpartition(".")
    parent = modules.get(around)
    if parent is None or not _is_of(parent, _LIBRARIES):
        return None
    if type(module).__name__ == "Conv1D":
        sizes = (param.shape[0],) * (param.shape[1] // param.shape[0]) if name == "c_attn" else ()
        return Structure(sizes=sizes, transposed=True)
    return _fused(name, param.shape[0], param.shape[1], parent)


def _experts(candidate: Candidate) -> Structure | None:
    """Of transformers: it writes on the instance how the experts of a class lie."""
    transposed = getattr(candidate.module, "is_transposed", None)
    if transposed is None:
        return None
    if candidate.attribute != "gate_up_proj" or not getattr(candidate.module, "has_gate", True):
        return Structure(transposed=transposed)
    outputs = candidate.param.shape[2 if transposed else 1]
    if getattr(candidate.module, "is_concatenated", True):
        return Structure(sizes=(outputs // 2,) * 2, transposed=transposed)
    return Structure(sizes=(1, 1), repeats=outputs // 2, transposed=transposed)


def _fused(name: str, outputs: int, inputs: int, parent: Any) -> Structure | None:
    """Of a Linear called `name` in a module of transformers or timm."""
    if name == "gate_up_proj" and outputs % 2 == 0:
        return Structure(sizes=(outputs // 2,) * 2)
    if name in ("qkv", "Wqkv") and outputs == 3 * inputs:
        return Structure(sizes=(outputs // 3,) * 3)
    kind, config = type(parent).__name__, getattr(parent, "config", None)
    if name == "qkv_proj" and kind == "Phi3Attention":
        queries = _heads(config) * parent.head_dim
        return Structure(sizes=(queries, (outputs - queries) // 2, (outputs - queries) // 2))
    if name == "query_key_value":
        if kind in ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"):
            heads = _heads(config) if config is not None else parent.num_heads
            return Structure(sizes=(outputs // (3 * heads),) * 3, repeats=heads)
        if kind.startswith("Falcon"):
            return _falcon(parent)
    return None


def _falcon(parent: Any) -> Structure:
    heads, size = parent.num_heads, parent.head_dim
    if parent.new_decoder_architecture:
        return Structure((heads // parent.num_kv_heads * size, size, size), parent.num_kv_heads)
    if parent.multi_query:
        return Structure((heads * size, size, size))
    return Structure((size, size, size), heads)


def _heads(config: Any) -> int:
    return getattr(config, "num_attention_heads", None) or config.n_head


def _is_of(module: nn.Module, libraries: tuple[str, ...]) -> bool:
    return any(cls.__module__.startswith(libraries) for cls in type(module).__mro__)
