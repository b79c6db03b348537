"""State dicts in FSDP2's layout: hooks that turn resting tensors into evenly sharded ones, and back.

What a state dict shows of a dedicated parameter is the DTensor that plain FSDP2 would have had there: the
same mesh, placements and chunk sizes; under DDP, the whole tensor. So `torch.distributed.checkpoint` reads
and writes it like any other, on any number of ranks, and files do not show that dmuon wrote them.

Each conversion brings one whole matrix at a time to every rank, which costs its bytes once and keeps the
memory needed at one matrix.

The optimizer's side speaks the words of `torch.optim.Muon` and `torch.optim.AdamW`: the same names of states
and settings, with the same meaning. So a state can go from them to dmuon and back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..engine.collectives import explained
from ..engine.layout import local_slices, wrap_local
from ..engine.owned import OwnedTensor
from ..engine.parameter import READ_RULE, DedicatedParam, local_part
from ..optim.newton_schulz import COEFFICIENTS, Coefficients
from ..optim.state import local_state, shapes
from ..optim.state import zeros as initial
from ..optim.variants import State

if TYPE_CHECKING:
    from ..optim.muon import Muon

logger = logging.getLogger(__name__)

# The settings of a group: those of torch's optimizers, without which a state is refused; those that dmuon has
# besides, where ours stay if the state has none; and what is no setting of an optimizer, but travels with it.
_REQUIRED = {
    "muon": {"lr", "weight_decay", "momentum", "nesterov", "ns_steps", "ns_coefficients", "adjust_lr_fn"},
    "adamw": {"lr", "weight_decay", "betas", "eps"},
}
OURS = {
    "muon": {"algorithm", "maximize", "ns_dtype", "ns_algorithm", "cautious_weight_decay", "step"},
    "adamw": {"algorithm"},
}
_BESIDES = {"maximize", "initial_lr", "name", "param_names"}
# Those that only torch has: with one meaning that we share, or a choice of kernel, which is ours to make.
_FIXED: dict[str, dict[str, Any]] = {
    "muon": {"eps": 1e-7},
    "adamw": {"amsgrad": False, "decoupled_weight_decay": True},
}
_KERNELS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


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
                state_dict[prefix + param.attribute] = stock_weight(param)

    def load(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *rest: Any
    ) -> None:
        for param in params:
            value = state_dict.get(prefix + param.attribute)
            if value is None or value.shape != param.full_shape:  # torch reports what does not fit
                continue
            if value is param.resting:
                value = param.take_even_chunks()
                # Lightning loads a submodule's parameters one by one, as if the others were missing.
                if value is None and prefix:
                    raise RuntimeError(
                        f"the state dict to load holds the very parameter {param.param_name} of this model, "
                        "not a value for it. It is missing in what torch's set_model_state_dict was given; "
                        "dmuon.set_model_state_dict with strict=False takes such states."
                    )
                if value is None:
                    continue
            if param.resting.is_meta and not value.is_meta:
                if not metadata.get("assign_to_params_buffers", False):
                    raise RuntimeError(
                        f"{param.param_name} is on the meta device: call model.to_empty(device=...) before a "
                        "state dict is loaded, or load it with assign=True"
                    )
                param.materialize()
            load_weight(param, value)
            # The weight is in place: whether torch copies or assigns now, it deals with the same object.
            param.show_resting()
            state_dict[prefix + param.attribute] = param.resting

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


def stock_weight(param: DedicatedParam) -> torch.Tensor:
    """What a state dict shows of a weight: a new tensor; collective."""
    if param.resting.is_meta:
        return _as_stock(torch.empty(param.piece_shape, dtype=param.resting.dtype, device="meta"), param)
    return _as_stock(param.piece(), param)


@torch.no_grad()
def load_weight(param: DedicatedParam, value: torch.Tensor) -> None:
    """Take over a whole weight, or a DTensor of it on any mesh; collective for a DTensor."""
    whole = _whole(value, param)
    if param.resting.is_meta:
        return
    if param.keeps_weight:
        param.local.copy_(_piece_of(whole, param))
    else:
        param.settle()  # all ranks do: a publish may need them
    param.mark_updated()
    param.published = param.version  # every replica has taken it over by itself


# The optimizer


def install_optimizer_hooks(optimizer: Muon) -> None:
    """Convert the momentum of dedicated parameters in the optimizer's `state_dict` and `load_state_dict`.

    Loading raises ValueError, by name, before anything has changed, for what is missing or does not fit.
    """
    loaded: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {}  # of Muon's parameters

    def save(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [settings_to_save(group) for group in state_dict["param_groups"]]
        if optimizer._consolidated is not None:
            rank, state = optimizer._consolidated
            if dist.get_rank() != rank:
                raise RuntimeError(
                    f"the optimizer's state was consolidated on rank {rank}, and state_dict() is for that "
                    "rank alone until the next step or load. Call consolidate_state_dict(to=...) for "
                    "another one, or state_dict() on all ranks without it."
                )
            return {**state_dict, "state": state, "param_groups": groups}
        optimizer.check_members()
        state = dict(state_dict["state"])
        params = [(p, group["algorithm"]) for group in optimizer.param_groups for p in group["params"]]
        for index, (resting, algorithm) in enumerate(params):
            param, entry = optimizer._record(resting), state.get(index) or {}
            if param is not None and entry:
                optimizer.check_team(param)
                state[index] = {name: _stock_state(param, value) for name, value in entry.items()}
            elif not entry and state:  # frozen ones too: they may not be when the state is loaded
                state[index] = first_state(optimizer, resting, algorithm)
        state = dict(sorted(state.items()))  # of full states, the parts are gathered in this order
        return {**state_dict, "state": state, "param_groups": groups}

    def before_load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        # The state may be keyed by name: keys are what the loaded groups list. torch would cast Muon's to the
        # parameter's dtype on the way in, so it goes round torch.
        loaded.clear()
        optimizer._consolidated = None
        optimizer.check_members()
        optimizer.synchronize()  # a publish in flight may have to read momentum still
        values: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {}
        state, groups = dict(state_dict["state"]), []
        for mine, theirs in _paired(optimizer, state_dict):
            names = [optimizer._names[id(p)] for p in mine["params"]]
            groups.append({**_settings_to_load(mine, theirs, names), "params": theirs["params"]})
            for resting, key, name in zip(mine["params"], theirs["params"], names, strict=True):
                entry = state.get(key)
                if entry is None:
                    _check_absent(state, key, name, resting)
                    continue
                check_entry(entry, name, resting, mine["algorithm"], optimizer)
                if entry and mine["algorithm"] == "muon":
                    values[resting] = entry
                    state[key] = {}
                else:
                    state[key] = {k: v if k == "step" else _as_lies(v, resting) for k, v in entry.items()}
        loaded.update(values)
        return {**state_dict, "state": state, "param_groups": groups}

    def after_load(optimizer: Any) -> None:
        for resting, entry in loaded.items():
            for name, local in local_state(optimizer, resting).items():
                _take(optimizer, resting, entry[name], local)
        loaded.clear()
        for group in optimizer.param_groups:
            for resting in group["params"]:
                if "step" in optimizer.state.get(resting, {}):
                    step = torch.as_tensor(optimizer.state[resting]["step"], dtype=torch.float32)
                    # The fused kernel wants it where the parameter is, and a file may come from another one.
                    fused = optimizer._adamw_kernel.get("fused")
                    optimizer.state[resting]["step"] = step.to(resting.device) if fused else step

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)


@torch.no_grad()
def whole_state(state: Mapping[Any, Mapping[str, Any]], *, keep: bool) -> dict[Any, dict[str, Any]]:
    """The states of all parameters with whole tensors on the CPU, where `keep`; nothing elsewhere. Collective
    for DTensors."""
    found: dict[Any, dict[str, Any]] = {}
    for key, entry in state.items():
        for name, value in entry.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                found.setdefault(key, {})[name] = whole.to("cpu", copy=True)
    return found


def _take(optimizer: Muon, resting: torch.Tensor, value: torch.Tensor, local: torch.Tensor) -> None:
    """Load a state of a parameter of Muon's; collective for a DTensor of a dedicated one."""
    param = optimizer._record(resting)
    if param is None:
        value = _as_lies(value, resting)
        if isinstance(value, DTensor) and isinstance(resting, DTensor):
            value = value.redistribute(placements=resting.placements)
        local.copy_(local_part(value))
        return
    whole = _whole(value, param)
    if param.keeps_state:
        local.copy_(whole[param.part] if param.has_team else whole)


def _as_lies(whole: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A whole tensor of each rank as a base parameter lies; a DTensor as it is."""
    if isinstance(whole, DTensor) or not isinstance(param, DTensor):
        return whole
    mine = whole[local_slices(whole.shape, param.device_mesh, param.placements)]
    return wrap_local(mine.clone().to(param.device), whole.shape, param.device_mesh, param.placements)


def first_state(optimizer: Muon, resting: torch.Tensor, algorithm: str) -> dict[str, torch.Tensor]:
    """What a parameter that has had no gradient yet stands for, so that it is not missing in a file."""
    if algorithm == "muon":
        return {state.name: _stock_zeros(optimizer, resting, state) for state in optimizer.variant.states}
    zeros = torch.zeros_like(resting)
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": zeros.detach(), "exp_avg_sq": zeros.detach().clone()}


def _stock_zeros(optimizer: Muon, resting: torch.Tensor, state: State) -> torch.Tensor:
    param = optimizer._record(resting)
    if param is None:
        return initial(optimizer, resting, state)
    device, dtype = param.layout.device, state.dtype or optimizer.momentum_dtype
    if state.per == "row":
        return torch.zeros(param.structure.row_shape(param.full_shape), dtype=dtype, device=device)
    return _as_stock(torch.zeros(param.piece_shape, dtype=dtype, device=device), param)


def _paired(optimizer: Muon, state_dict: Mapping[str, Any]) -> Iterator[tuple[dict, dict]]:
    """Each group of the optimizer and the one to load into it."""
    mine, theirs = optimizer.param_groups, state_dict["param_groups"]
    if len(mine) != len(theirs):
        raise ValueError(
            f"the optimizer state to load has {len(theirs)} parameter groups, this optimizer {len(mine)}"
        )
    for number, (group, other) in enumerate(zip(mine, theirs, strict=True)):
        if len(group["params"]) != len(other["params"]):
            first = optimizer._names[id(group["params"][0])] if group["params"] else "none"
            raise ValueError(
                f"parameter group {number} of the optimizer state to load has {len(other['params'])} "
                f"parameters, this optimizer's ({first}, ...) has {len(group['params'])}"
            )
        yield group, other


def _check_absent(state: Mapping[Any, Any], key: Any, name: str, resting: torch.Tensor) -> None:
    """A parameter without state: of a run that never stepped, frozen, or left out by `strict=False`."""
    if not state or not resting.requires_grad:
        return
    if not isinstance(key, str):
        raise ValueError(f"the optimizer state to load has nothing for {name}")
    warn_of_absent(name)


def warn_of_absent(name: str) -> None:
    """Say that a parameter starts anew, which `strict=False` has left out."""
    logger.warning("the optimizer state loaded has nothing for %s, which starts anew", name)


def check_entry(
    entry: Mapping[str, Any], name: str, param: torch.Tensor, algorithm: str, optimizer: Muon
) -> None:
    """Raise for states of one parameter that are missing, of another algorithm, or of another shape."""
    if not entry and not param.requires_grad:
        return
    if algorithm == "muon":
        whose, expected = optimizer.variant.name, shapes(optimizer, param)
    else:
        whose, expected = "AdamW", {"step": torch.Size(), "exp_avg": param.shape, "exp_avg_sq": param.shape}
    if set(entry) != set(expected):
        raise ValueError(
            f"the optimizer state to load for {name} is {sorted(entry)}, that of {whose} is "
            f"{sorted(expected)}"
        )
    for key, value in entry.items():
        shape = expected[key]
        if not isinstance(value, torch.Tensor):
            if key != "step":
                raise ValueError(f"the {key} to load for {name} is {value!r}, no tensor")
        elif value.shape != shape:
            raise ValueError(
                f"the {key} to load for {name} has shape {tuple(value.shape)}, it needs {tuple(shape)}"
            )


def settings_to_save(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings in plain values, with all that torch's optimizers read."""
    if group["algorithm"] != "muon":
        return {**group, **_FIXED["adamw"], **_KERNELS}
    coefficients, dtype = group["ns_coefficients"], group["ns_dtype"]
    if isinstance(coefficients, str) and len(COEFFICIENTS[coefficients]) == 1:
        coefficients = COEFFICIENTS[coefficients][0]
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    return {**group, **_FIXED["muon"], "ns_coefficients": coefficients, "ns_dtype": dtype}


def _settings_to_load(mine: Mapping[str, Any], theirs: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """A group's settings, from those that `settings_to_save`, `torch.optim.Muon` or AdamW have written."""
    algorithm = mine["algorithm"]
    settings = {key: value for key, value in theirs.items() if key != "params"}
    first = names[0] if names else "no parameter"
    if settings.get("algorithm", algorithm) != algorithm:
        raise ValueError(
            f"the optimizer state to load for the group of {first} is of {settings['algorithm']!r}, this "
            f"optimizer's of {algorithm!r}"
        )
    for key, value in _FIXED[algorithm].items():
        if settings.pop(key, value) != value:
            raise ValueError(
                f"the optimizer state to load for the group of {first} has {key}={theirs[key]!r}; dmuon "
                f"knows only {value!r}"
            )
    if algorithm == "adamw":
        settings = {key: value for key, value in settings.items() if key not in _KERNELS}
    missing = _REQUIRED[algorithm] - set(settings)
    unknown = set(settings) - _REQUIRED[algorithm] - OURS[algorithm] - _BESIDES - set(mine)
    faults = [f"lacks the settings {sorted(missing)}"] if missing else []
    faults += [f"has unknown settings {sorted(unknown)}"] if unknown else []
    if faults:
        raise ValueError(f"the optimizer state to load for the group of {first} {' and '.join(faults)}")
    if isinstance(settings.get("ns_dtype"), str):
        settings["ns_dtype"] = getattr(torch, settings["ns_dtype"])
    if algorithm == "muon" and _same(mine["ns_coefficients"], settings["ns_coefficients"]):
        settings["ns_coefficients"] = mine["ns_coefficients"]
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])  # a list, after a full state dict
    return {**{key: value for key, value in mine.items() if key != "params"}, **settings}


def _same(mine: Coefficients, theirs: Coefficients) -> bool:
    """Whether two spellings mean the same coefficients."""
    return _plain(mine) == _plain(theirs)


def _plain(coefficients: Any) -> Any:
    if isinstance(coefficients, str):
        coefficients = COEFFICIENTS.get(coefficients, coefficients)
    if isinstance(coefficients, str):
        return coefficients
    plain = [list(c) if isinstance(c, (list, tuple)) else c for c in coefficients]
    return plain if plain and isinstance(plain[0], list) else [plain]


def _stock_state(param: DedicatedParam, value: torch.Tensor) -> torch.Tensor:
    """What a state dict shows of a state; what is per row, whole on every rank. Collective."""
    if isinstance(value, OwnedTensor):
        return _as_stock(param.piece_of_state(param.spread(value)), param)
    return param.spread_state(value, param.structure.row_shape(param.full_shape))


def _whole(value: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
    """What is to be loaded, on every rank; collective for a DTensor."""
    if not isinstance(value, DTensor):
        return value
    home = value.device_mesh.device_type
    if value.device.type not in (home, "meta"):  # offloaded to the CPU: collectives run where the mesh is
        value = cast(DTensor, value.to(home))
    with explained(f"the gathering of what is loaded for {param.param_name}", READ_RULE):
        return value.full_tensor()


def _piece_of(whole: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
    """This rank's piece of a whole matrix, under tensor parallelism."""
    return whole if param.tp is None else whole[param.tp.pieces[param.tp.position]]


def _as_stock(piece: torch.Tensor, param: DedicatedParam) -> torch.Tensor:
    """What plain FSDP2 or DDP would have here, from this rank's `piece` of the whole (`piece_shape`).

    DDP keeps it all. FSDP2 cuts the rows of what tensor parallelism has left; where that has cut rows too,
    the result is not contiguous, which the placement says.
    """
    layout, rows = param.layout, piece.shape[0]
    if layout.is_ddp:
        if param.tp is None:
            return piece
        # Not a view of the whole: it would keep all of it, and torch cannot deep-copy a DTensor of a view.
        return param.tp.wrap(piece.clone(memory_format=torch.contiguous_format))
    chunk = -(-rows // layout.shard_size)
    start = min(layout.here.shard * chunk, rows)
    local = piece[start : min(start + chunk, rows)].clone()
    return wrap_local(local, param.full_shape, param.mesh, param.fsdp_placements())
