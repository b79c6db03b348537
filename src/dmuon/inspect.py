"""What dmuon decided, for people to see: records, and a table of where every parameter went."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.tensor import DTensor

from .engine.parameter import DedicatedParam
from .engine.runtime import Runtime, find_runtime
from .ownership import imbalance, loads_of, matrices_of
from .selection import clean_name, why_not
from .structure import PLAIN


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """A record per dedicated parameter, in module order; the same on every rank.

    Raises:
        ValueError: if the model has none.
    """
    return list(find_runtime(model).params)


def get_owned_params(model: nn.Module, rank: int) -> list[DedicatedParam]:
    """The records of the parameters of whose owner row the global rank `rank` is part.

    Raises:
        ValueError: if the model has no dedicated parameters.
    """
    runtime = find_runtime(model)
    where = runtime.layout.coordinate_of(rank)
    return [param for param in runtime.params if param.coordinate == where]


def summary(model: nn.Module) -> str:
    """A table of every trainable parameter: its algorithm, its owner, its bytes; and the owners' balance.

    `kept by` names the global rank that runs Newton-Schulz for the matrix (of this rank's slice of the mesh),
    or one of the team that does. `bytes` are those of the whole tensor. The last lines say how evenly the
    work is spread: the busiest owner's operations against the mean, and against the best that any assignment
    can do; which embeddings and heads were guessed to be such; and, once `Muon` is built, in which dtype and
    with which backend it orthogonalizes.

    Raises:
        ValueError: if the model has no dedicated parameters.
    """
    runtime = find_runtime(model)
    rows = [("parameter", "shape", "dtype", "algorithm", "kept by", "bytes")]
    totals = {"muon": 0, "adamw": 0}
    stacks = {id(stack.param) for stack in runtime.stacks}
    for name, tensor in model.named_parameters():
        if not tensor.requires_grad:
            continue
        param = runtime.record_of(tensor)
        algorithm = "muon" if param is not None or id(tensor) in stacks else "adamw"
        nbytes = tensor.numel() * tensor.element_size()
        totals[algorithm] += nbytes
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        keeper = _owner_text(param) if param is not None else _placement_text(tensor)
        rows.append(
            (
                clean_name(name),
                shape,
                str(tensor.dtype).removeprefix("torch."),
                algorithm,
                keeper,
                f"{nbytes:,}",
            )
        )
    lines = [*_table(rows), "", *_balance(runtime.params, totals), *_held(runtime)]
    dedicated = {param.param_name for param in runtime.params}
    for name, reason in why_not(runtime.model).items():
        if "guessed" in reason and name not in dedicated:
            lines.append(f"guessed: {name} is left to AdamW ({reason.replace(': guessed', '')})")
    if runtime.orthogonalization is not None:
        lines.append(f"newton-schulz: {runtime.orthogonalization}")
    return "\n".join(lines)


def _held(runtime: Runtime) -> list[str]:
    """What parameters hold that are not one matrix [out, in]; like ones of several layers once."""
    found: dict[tuple[str, str], int] = {}
    of_params = [(p.param_name, p.structure, p.full_shape) for p in runtime.params]
    for name, structure, shape in of_params + [(s.name, s.structure, s.param.shape) for s in runtime.stacks]:
        if structure != PLAIN or len(shape) > 2:
            kinds = " + ".join(f"{count} of {rows}x{cols}" for count, rows, cols in structure.matrices(shape))
            stored = ", stored [in, out]" if structure.transposed else ""
            key = (re.sub(r"\b\d+\b", "*", name), f"{kinds}{stored}")
            found[key] = found.get(key, 0) + 1
    return [f"holds: {name}: {what} ({times} parameters)" for (name, what), times in found.items()]


def _owner_text(param: DedicatedParam) -> str:
    where = f"{'team of ' if param.has_team else ''}rank {param.owner_rank}"
    return where if isinstance(param.owner, int) else f"{where} {param.owner}"


def _placement_text(tensor: object) -> str:
    return " ".join(map(str, tensor.placements)) if isinstance(tensor, DTensor) else "every rank"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns; the last one, a number, right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]))
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _balance(params: list[DedicatedParam], totals: dict[str, int]) -> list[str]:
    layout = params[0].layout
    matrices = matrices_of([p.structure.matrices(p.full_shape) for p in params], [None] * len(params))
    slots = [layout.slot_of(param.coordinate) for param in params]
    by_owner = loads_of(matrices, slots, layout.size)
    owners = sum(load > 0 for load in by_owner)
    of_bound = imbalance(matrices, slots, layout.size)
    return [
        f"muon: {len(params)} matrices, {totals['muon']:,} bytes, on {owners} of {layout.size} ranks; "
        f"adamw: {totals['adamw']:,} bytes",
        f"balance: the busiest owner has {of_bound:.3f} of the lower bound on its operations, "
        f"{max(by_owner) * layout.size / sum(by_owner):.3f} of the mean",
    ]
