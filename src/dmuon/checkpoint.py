"""State dicts in FSDP2's layout: hooks that turn resting tensors into evenly sharded ones, and back.

What a state dict shows of a dedicated parameter is the DTensor that plain FSDP2 would have had there: the
same mesh, placements and chunk sizes; under DDP, the whole tensor. So `torch.distributed.checkpoint` reads
and writes it like any other, on any number of ranks, and files do not show that dmuon wrote them.

Each conversion brings one whole matrix at a time to every rank, which costs its bytes once and keeps the
memory needed at one matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .comm import explained
from .layout import wrap_local
from .parameter import READ_RULE, DedicatedParam

if TYPE_CHECKING:
    from .optim.muon import Muon

_MOMENTUM = "momentum_buffer"
_NS_DTYPE = "ns_dtype"


def install_model_hooks(params: list[DedicatedParam]) -> None:
    """Convert these parameters in `state_dict` and `load_state_dict` of the modules that hold them."""
    by_module: dict[nn.Module, list[DedicatedParam]] = {}
    for param in params:
        by_module.setdefault(param.module, []).append(param)
    for module, held in by_module.items():
        _install_module_hooks(module, held)


def _install_module_hooks(module: nn.Module, params: list[DedicatedParam]) -> None:
    def save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for param in params:
            if prefix + param.attribute in state_dict:
                state_dict[prefix + param.attribute] = _stock_weight(param)

    def load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for param in params:
            value = state_dict.get(prefix + param.attribute)
            if value is not None and value.shape == param.full_shape:  # torch reports what does not fit
                load_weight(param, value)
                # The weight is in place: whether torch copies or assigns now, it deals with the same object.
                state_dict[prefix + param.attribute] = param.resting

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


def _stock_weight(param: DedicatedParam) -> torch.Tensor:
    if param.resting.is_meta:
        return _as_stock(torch.empty(param.piece_shape, dtype=param.resting.dtype, device="meta"), param)
    return _as_stock(param.piece(), param)


@torch.no_grad()
def load_weight(param: DedicatedParam, value: torch.Tensor) -> None:
    """Take over a whole weight, or a DTensor of it on any mesh; collective for a DTensor."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if param.resting.is_meta:
        return
    if param.before_read is not None:  # on all ranks: a publish in flight may need them all
        param.before_read()
    if param.keeps_weight:
        param.local.copy_(_piece_of(whole, param))
    param.mark_updated()
    param.published = param.version  # every replica has taken it over by itself


def install_optimizer_hooks(optimizer: Muon) -> None:
    """Convert the momentum of dedicated parameters in the optimizer's `state_dict` and `load_state_dict`."""
    loaded: dict[DedicatedParam, torch.Tensor] = {}

    def save(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = dict(state_dict["state"])
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, resting in enumerate(params):
            param = optimizer._record(resting)
            if param is not None and _MOMENTUM in state.get(index, {}):
                shard = _stock_momentum(param, state[index][_MOMENTUM])
                state[index] = {**state[index], _MOMENTUM: shard}
        groups = [_with_dtype_names(group) for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def before_load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        # The state may be keyed by name: keys are what the loaded groups list. torch would cast the momentum
        # to the parameter's dtype on the way in, so it goes round torch.
        loaded.clear()
        state = dict(state_dict["state"])
        for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
            for resting, key in zip(mine["params"], theirs["params"], strict=False):
                param = optimizer._record(resting)
                if param is not None and _MOMENTUM in state.get(key, {}):
                    entry = dict(state[key])
                    loaded[param] = entry.pop(_MOMENTUM)
                    state[key] = entry
        groups = [_with_dtypes(group) for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    def after_load(optimizer: Any) -> None:
        for param, value in loaded.items():
            if value.shape != param.full_shape:
                raise ValueError(
                    f"the momentum to load for {param.param_name} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(param.full_shape)}"
                )
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            optimizer.state[param.resting].pop(_MOMENTUM, None)
            local = optimizer._momentum(param)
            if param.keeps_state:
                local.copy_(_piece_of(whole, param) if param.in_pieces else whole)
        loaded.clear()

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)


def _with_dtype_names(group: dict[str, Any]) -> dict[str, Any]:
    """Dtypes as text: torch's full state dicts hold numbers, text and tensors, and nothing else."""
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in group.items()}


def _with_dtypes(group: dict[str, Any]) -> dict[str, Any]:
    value = group.get(_NS_DTYPE)
    return {**group, _NS_DTYPE: getattr(torch, value)} if isinstance(value, str) else group


def _stock_momentum(param: DedicatedParam, momentum: DTensor) -> torch.Tensor:
    state = torch.empty(param.state_shape, dtype=momentum.dtype, device=param.layout.device)
    if param.keeps_state:
        state.copy_(momentum._local_tensor)
    with explained(f"the broadcast of the momentum of {param.param_name} to all ranks", READ_RULE):
        if param.in_owner_row and param.tp is not None and param.is_cut and not param.in_pieces:
            param.tp.broadcast_from(state, param.tp_owner)
        param.layout.broadcast_from_owner(state, param.coordinate)
    return _as_stock(state if param.in_pieces else _piece_of(state, param), param)


def _piece_of(whole: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
    """This rank's piece of a whole matrix, under tensor parallelism."""
    return whole if param.tp is None else whole[param.tp.pieces[param.tp.position]]


def _as_stock(piece: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
    """What plain FSDP2 or DDP would have here, from this rank's `piece` of the whole (`piece_shape`).

    DDP keeps it all. FSDP2 cuts the rows of what tensor parallelism has left; where that has cut rows too,
    the result is not contiguous, which the placement says.
    """
    layout, rows = param.layout, piece.shape[0]
    if layout.replicated:
        if param.tp is None:
            return piece
        # Not a view of the whole: it would keep all of it, and torch cannot deep-copy a DTensor of a view.
        return param.tp.wrap(piece.clone(memory_format=torch.contiguous_format))
    chunk = -(-rows // layout.shard_size)
    start = min(layout.here.shard * chunk, rows)
    local = piece[start : min(start + chunk, rows)].clone()
    return wrap_local(local, param.full_shape, param.mesh, param.fsdp_placements())
