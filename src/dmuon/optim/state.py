"""Where the state of Muon's parameters lies: with whoever orthogonalizes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.layout import wrap_local
from ..engine.parameter import local_part
from .variants import State

if TYPE_CHECKING:
    from .muon import Muon


def local_state(optimizer: Muon, resting: Tensor) -> dict[str, Tensor]:
    """What this rank keeps for a parameter of Muon's, by name: local tensors, made when first asked for.

    Of a dedicated parameter, on the ranks that keep state: `state_shape` per element, `row_shape` per row;
    elsewhere nothing. Of a stack: as the parameter lies, whole matrices.
    """
    param = optimizer._record(resting)
    if param is not None:
        optimizer.check_team(param)
    kept = optimizer.state[resting]
    for state in optimizer.variant.states:
        if state.name not in kept:
            kept[state.name] = zeros(optimizer, resting, state)
    return {state.name: local_part(kept[state.name]) for state in optimizer.variant.states}


def zeros(optimizer: Muon, resting: Tensor, state: State) -> Tensor:
    """A state before the first step, as it lies at rest."""
    dtype = state.dtype or optimizer.momentum_dtype
    param = optimizer._record(resting)
    if param is not None:
        device, kept = param.layout.device, param.keeps_state
        if state.per == "row":
            shape = param.structure.row_shape(param.full_shape) if kept else (0,)
            return torch.zeros(shape, dtype=dtype, device=device)
        whole = torch.zeros(param.state_shape, dtype=dtype, device=device) if kept else None
        return param.wrap_owned(whole, dtype)
    if state.per == "element":
        return torch.zeros_like(resting, dtype=dtype)
    structure, local = optimizer._stacks[id(resting)], local_part(resting)
    rows = torch.zeros(structure.row_shape(local.shape), dtype=dtype, device=local.device)
    if not isinstance(resting, DTensor):
        return rows
    shape = torch.Size(structure.row_shape(resting.shape))
    return wrap_local(rows, shape, resting.device_mesh, resting.placements)


def shapes(optimizer: Muon, resting: Tensor) -> dict[str, torch.Size]:
    """Of the state of a parameter of Muon's, whole, by name."""
    param = optimizer._record(resting)
    structure = param.structure if param is not None else optimizer._stacks[id(resting)]
    return {
        state.name: resting.shape
        if state.per == "element"
        else torch.Size(structure.row_shape(resting.shape))
        for state in optimizer.variant.states
    }
