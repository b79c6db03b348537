"""What a parameter group may hold: parameters of the model, averaged gradients, and settings in range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from ..engine import fsdp
from ..engine.agreement import fingerprint, gather_objects, ranks_of
from ..engine.ddp import ddp_around
from ..engine.parameter import record_of
from ..engine.runtime import Runtime, find_runtime
from ..selection import clean_name
from .newton_schulz import resolve_coefficients
from .update import check_rule

BY_STEP = {"momentum", "ns_coefficients"}  # settings that may be functions of the step
_COMMON = {"params", "weight_decay", "maximize"}  # settings with one meaning for both algorithms


def find_model(given: Any) -> tuple[nn.Module, list[dict[str, Any]] | None, bool]:
    """The model, from what an optimizer is given: the model itself, or parameters in any form of torch's.

    Returns:
        The model; the groups, or None where the model was given; whether parameters came as pairs of a name
        and a tensor.

    Raises:
        TypeError: for what is neither.
        ValueError: for parameters of which none is dedicated, or of several models.
    """
    if isinstance(given, nn.Module):
        return given, None, False
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(
            f"the model itself is wanted, or its parameters in an iterable, not a {type(given).__name__}"
        )
    items = [given] if isinstance(given, Mapping) else list(given)
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    groups: list[dict[str, Any]] = []
    named = False
    for group in items:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f'a parameter group must be a dict with an entry "params", got {group!r}')
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        named = named or any(isinstance(param, tuple) for param in params)
        groups.append({**group, "params": [p[1] if isinstance(p, tuple) else p for p in params]})
    records = [record_of(param) for group in groups for param in group["params"]]
    models = {id(m): m for m in (r.model() for r in records if r is not None) if m is not None}
    if len(models) != 1:
        raise ValueError(
            f"the parameters given to dmuon.Muon are of {len(models)} models with dedicated parameters, not "
            "of one: call dmuon.dedicate_params(model, mesh) first, collect the parameters after it and "
            "after fully_shard, and build an optimizer for each model"
        )
    model = next(iter(models.values()))
    muons = {id(stack.param) for stack in find_runtime(model).stacks}
    split = []
    for group in groups:
        parts: dict[bool, list] = {True: [], False: []}
        for param in group["params"]:
            parts[record_of(param) is not None or id(param) in muons].append(param)
        if set(group) <= _COMMON and all(parts.values()):
            split += [{**group, "params": part} for part in parts.values()]
        else:  # with a learning rate for both, it is refused later
            split.append(group)
    return model, split, named


def find_parameters(
    group: Mapping[str, Any], model: nn.Module, inner: nn.Module, known: Container[int]
) -> dict[str, Any]:
    """The group with its parameters looked up, which may be given by name.

    model: as the optimizer was given it; inner: the same, or the dedicated model inside that wrapper.
    known: ids of the parameters that it had then, and that have been checked.

    Raises:
        ValueError: for a group without `params`, and for parameters that are not the model's.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise ValueError(f'a parameter group must be a dict with an entry "params", got {group!r}')
    by_name = dict(model.named_parameters()) | dict(inner.named_parameters())
    by_name |= {clean_name(name): param for name, param in by_name.items()}
    given = group["params"]
    given = [given] if isinstance(given, (torch.Tensor, str)) else list(given)
    params = []
    for item in given:
        if isinstance(item, tuple) and len(item) == 2:  # as model.named_parameters() gives them
            item = item[1]
        if isinstance(item, str):
            if item not in by_name:
                raise ValueError(f"param_groups: the model has no parameter {item!r}")
            item = by_name[item]
        if id(item) not in known:
            shape = tuple(getattr(item, "shape", ()))
            raise ValueError(
                f"param_groups: a parameter of shape {shape} is not one of the model's parameters (any "
                "more). dedicate_params and fully_shard replace parameters: collect them afterwards, or "
                "give them by name."
            )
        params.append(item)
    return {**group, "params": params}


def check_membership(groups: Sequence[Mapping[str, Any]], runtime: Runtime, *, may_lack: bool) -> None:
    """Refuse groups whose parameters somebody has exchanged, or that differ between ranks; collective.

    may_lack: trainable parameters of Muon's may be in no group, as long as groups are being added.

    Raises:
        RuntimeError: on all ranks, unless each trainable parameter of Muon's is there once, with its like,
            and the same on all ranks.
    """
    wanted = {id(record.resting): (record.param_name, record.resting) for record in runtime.params}
    wanted |= {id(stack.param): (stack.name, stack.param) for stack in runtime.stacks}
    counts: Counter[str] = Counter()
    listed = []  # Muon's parameters in each group, by name
    problem = None
    for group in groups:
        names = [wanted[id(param)][0] for param in group["params"] if id(param) in wanted]
        counts.update(names)
        listed.append(names)
        stranger = next((param for param in group["params"] if id(param) not in wanted), None)
        if group["algorithm"] == "muon" and stranger is not None:
            problem = f"a parameter of shape {tuple(stranger.shape)} in a group of Muon's is not dedicated"
        elif group["algorithm"] != "muon" and names:
            problem = f"{names[0]} is dedicated, and in a group of AdamW's"
    for name, param in wanted.values():
        count = counts[name]
        if count > 1 or (count == 0 and param.requires_grad and not may_lack):
            problem = (
                f"{name} is {count} times in the optimizer's parameter groups, not once"
                if count
                else f"{name} is trainable, and not in the optimizer's parameter groups"
            )
            break
    answers = gather_objects(ranks_of(runtime.params), (problem, fingerprint(listed)))
    problem = next((found for found, _ in answers if found is not None), None)
    if problem is None and len({listed_there for _, listed_there in answers}) > 1:
        first = runtime.params[0].param_name
        problem = f"the ranks do not have the same parameter groups of dedicated parameters ({first}, ...)"
    if problem is not None:
        raise RuntimeError(
            f"{problem}. Something has exchanged the parameters that dmuon.Muon was given, such as by their "
            "data_ptr(), which is 0 for all that a rank does not own; or they were not given alike on all "
            "ranks. Build dmuon.Muon last, on the model as it is trained, and leave its param_groups to "
            "optimizer.add_param_group."
        )


def functions_of(settings: Mapping[str, Any]) -> dict[str, Callable[[int], Any]]:
    """The settings that are functions of the step.

    Raises:
        ValueError: for one that cannot be.
    """
    functions = {key: value for key, value in settings.items() if callable(value)}
    if wrong := sorted(set(functions) - BY_STEP):
        raise ValueError(f"{wrong[0]} cannot be a function of the step; only {sorted(BY_STEP)} can")
    return functions


def at_step(settings: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The settings, with the values of those that are functions of the step."""
    return {**settings, **{key: function(step) for key, function in functions_of(settings).items()}}


def check_muon(group: Mapping[str, Any]) -> None:
    """Validate a Muon group's settings by name."""
    check_rule(group)
    resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    if group["ns_dtype"] is not None:
        check_dtype("ns_dtype", group["ns_dtype"])
    if group["ns_algorithm"] not in ("auto", "direct", "gram"):
        raise ValueError(f"ns_algorithm must be 'auto', 'direct' or 'gram', got {group['ns_algorithm']!r}")


def check_adamw(group: Mapping[str, Any]) -> None:
    """Validate an AdamW group's settings, by the check of torch's own AdamW."""
    probe = [torch.zeros(1)]
    settings = {key: group[key] for key in ("betas", "eps", "weight_decay")}
    try:
        AdamW(probe, lr=float(group["lr"]), **settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"AdamW settings: {error}") from error


def check_dtype(name: str, dtype: object) -> torch.dtype:
    """`dtype` if it is a floating-point one, else ValueError with the setting's name."""
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name} must be a floating-point dtype, got {dtype!r}")
    return dtype


def check_averaged(model: nn.Module, runtime: Runtime) -> None:
    """Refuse base parameters whose gradients nobody averages: ranks would drift apart in silence.

    Under DDP a DistributedDataParallel may still come around the model; then the first forward refuses.

    model: as the optimizer was given it, with a wrapper around it if there is one.

    Raises:
        ValueError: with the parameter's name; for a DistributedDataParallel over other ranks.
    """
    layout = runtime.layout
    if layout.size == 1:
        return
    cure = (
        "Wrap the model with fully_shard(model, mesh=...) after dedicate_params and before dmuon.Muon, or "
        "freeze the parameter."
    )
    if layout.is_ddp:
        wrapper = ddp_around(model, runtime.model)
        if wrapper is not None:
            runtime.averaging.check_wrapper(wrapper)
            return
        cure = (
            "Call dmuon.replicate(model, mesh), or replicate_tp, after dedicating and before dmuon.Muon; "
            "torch's DistributedDataParallel does not go with tensor parallelism."
        )
    averaged = fsdp.managed_parameters(model)
    for name, param in model.named_parameters():
        if not param.requires_grad or runtime.record_of(param) is not None or id(param) in averaged:
            continue
        if isinstance(param, DTensor) and _has_dims_of(param.device_mesh, layout.mesh):
            continue
        if layout.is_ddp and not any(_is_cut(p, runtime) for p in model.parameters()):
            runtime.averaging.needs_ddp = name
            return
        raise ValueError(
            f"{name} is neither dedicated nor sharded, so nothing would average its gradient over the "
            f"{layout.size} data-parallel ranks. {cure}"
        )


def _is_cut(param: torch.Tensor, runtime: Runtime) -> bool:
    """Whether tensor parallelism has made a DTensor of a parameter under DDP."""
    record = runtime.record_of(param)
    return isinstance(param, DTensor) if record is None else record.tp is not None


def _has_dims_of(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether a mesh runs over all the ranks of another, so that its DTensors can be whole over them."""
    return set(other.mesh.flatten().tolist()) <= set(mesh.mesh.flatten().tolist())
