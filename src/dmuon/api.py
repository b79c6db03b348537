"""`dedicate_params`: read the mesh, choose the parameters, plan their owners, install the engine.

Everything that cannot work is refused here, on every rank alike and before any collective. None is issued
here at all, but for weights that come as DTensors over the data-parallel dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .checkpoint.hooks import install_model_hooks
from .choice import check_choice, chosen_parameters, warn_of_choice
from .engine import fsdp
from .engine.buffer import Precision
from .engine.collectives import ProcessGroups
from .engine.ddp import FirstRankWins, shard_over_rows_of_one
from .engine.layout import DataParallelLayout, ranks_by_group, root_mesh
from .engine.parameter import DedicatedParam, record_of
from .engine.refusals import hide_from_ddp, refuse_late_calls, refuse_second_average
from .engine.runtime import Options, Runtime, find_runtime, has_runtime
from .engine.stack import Stack, lies_whole
from .engine.tensor_parallel import TensorParallel
from .ownership import blocks_of, choose_owners, cost_of, loads_of_stacks, matrices_of
from .recognition import StructureSpec, structures_of
from .selection import Candidate, Predicate
from .structure import Structure

BufferReuse = bool | Literal["gather", "scatter", "all"]
_REUSE = ("gather", "scatter", "all")
HookBoundary = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Predicate | None = None,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    master_dtype: torch.dtype | None = None,
    hook_boundary: HookBoundary | None = None,
    process_groups: ProcessGroups = "isolated",
    tp_buffer_reuse: BufferReuse = False,
    structure: StructureSpec | None = None,
) -> list[DedicatedParam]:
    """Give every matrix of the hidden layers one owner; `fully_shard` will leave these matrices alone.

    Call it before `fully_shard`, on all ranks, on the same model: it replaces each chosen parameter by one
    that has all its rows on its owner and none elsewhere, and installs forward hooks. No collective is
    issued (unless a weight is a DTensor over `mesh` itself, which stands for the whole tensor); the ranks'
    weights may still differ, the owner's win at the first forward. After `parallelize_module`, parameters
    that tensor parallelism has cut are recognised by their DTensors. The model may be on
    the meta device, to be materialised by `to_empty` after `fully_shard`.

    Args:
        model: the whole model, before `fully_shard`.
        mesh: the data-parallel mesh that `fully_shard` will be given: one dim, or two,
            `(replicate, shard)`, for HSDP.
        predicate: `predicate(name, parameter) -> bool` chooses the parameters, by fully qualified name
            (without what `torch.compile` and checkpoint wrappers put in between, as in checkpoints). By
            default, every 2-D weight of a hidden layer: no embedding, no head, no tied weight, no vector.
            Frozen parameters are never dedicated.
        replicate_mesh: for HSDP, the mesh dim that replicates, from the same root mesh as `mesh`, which is
            then the dim that shards.
        reshard_after_forward: True frees the full weights after forward and gathers them again for backward;
            False keeps them in between. By default, as the enclosing `fully_shard` module does.
        mp_policy: `param_dtype` is the dtype in which weights are gathered, `reduce_dtype` the one in which
            gradients are reduced. By default, the policy of the enclosing `fully_shard` module. Casting
            inputs and outputs is left to `fully_shard`.
        master_dtype: dtype of the weights at rest, which the optimizer updates and checkpoints hold; by
            default the model's. With torch.float32, a bfloat16 model goes on computing in bfloat16, and small
            updates are not lost in rounding.
        hook_boundary: modules whose dedicated parameters are gathered together when their forward is called:
            module classes, or `hook_boundary(name, module) -> bool`. By default, the modules that
            `fully_shard` wraps; if it wraps none, the elements of the model's module lists.
        process_groups: "isolated" creates process groups of our own; "shared" uses the mesh's.
        tp_buffer_reuse: keep the buffers in which tensor-parallel pieces travel, for the next exchange:
            "gather", those of gradients on their way to the TP owners; "scatter", those of updates on their
            way back; True or "all", both. It spares allocations, and costs the memory of the buffers that are
            in use at one time.
        structure: which matrices a parameter holds, where it is more than one, or stored as [in, out]: a dict
            from name patterns (`"*.qkv.weight"`, as `fnmatch`) to `dmuon.Structure`, or
            `structure(name, parameter, module) -> dmuon.Structure | None`. What it says nothing about goes by
            the layouts of transformers and timm that are known (`dmuon.summary` shows them), else a parameter
            is one matrix, or a stack of them if it has more dims. `dmuon.Structure()` is one matrix.

    Returns:
        A record per dedicated parameter, in module order (as `get_dedicated_params` gives it again).

    Raises:
        TypeError: for an argument of another type.
        ValueError: if nothing is chosen, if a chosen parameter cannot be dedicated (already taken by
            `fully_shard`, tied, not a floating-point matrix, Partial), if the meshes do not fit, or at a
            second call.
    """
    layout = DataParallelLayout.from_meshes(mesh, replicate_mesh)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")
    options = _options(
        reshard_after_forward, mp_policy, master_dtype, hook_boundary, process_groups, tp_buffer_reuse
    )
    return _dedicate(model, layout, options, predicate, structure)


def dedicate_params_ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Predicate | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    master_dtype: torch.dtype | None = None,
    hook_boundary: HookBoundary | None = None,
    process_groups: ProcessGroups = "isolated",
    structure: StructureSpec | None = None,
) -> list[DedicatedParam]:
    """`dedicate_params` for a model that stays whole on every data-parallel rank.

    It is HSDP with rows of one rank. Gradients are reduced to the owners, which alone keep momentum; their
    updates are sent to everyone after each step. Every rank keeps the weights, and nothing is gathered: where
    the compute dtype is the weights' own, the model computes with the very weights that are updated.

    The other parameters go to `replicate` afterwards, or the model to torch's `DistributedDataParallel`,
    which leaves the dedicated ones alone.

    Args:
        model: the whole model.
        mesh: the data-parallel mesh, of one dim.
        predicate: as for `dedicate_params`.
        mp_policy: as for `dedicate_params`; without it, weights and gradients travel in the model's dtype.
        master_dtype: as for `dedicate_params`.
        hook_boundary: as for `dedicate_params`.
        process_groups: as for `dedicate_params`.
        structure: as for `dedicate_params`.

    Returns:
        A record per dedicated parameter, in module order.

    Raises:
        TypeError: as `dedicate_params`.
        ValueError: as `dedicate_params`; and for a parameter that tensor parallelism has cut, which is for
            `dedicate_params_ddp_tp`.
    """
    layout = DataParallelLayout.from_meshes(mesh, ddp=True)
    options = _options(False, mp_policy, master_dtype, hook_boundary, process_groups)
    return _dedicate(model, layout, options, predicate, structure, cut_goes_to="dmuon.dedicate_params_ddp_tp")


def dedicate_params_ddp_tp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Predicate | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    master_dtype: torch.dtype | None = None,
    hook_boundary: HookBoundary | None = None,
    process_groups: ProcessGroups = "isolated",
    tp_buffer_reuse: BufferReuse = False,
    structure: StructureSpec | None = None,
) -> list[DedicatedParam]:
    """`dedicate_params_ddp` for a model that `parallelize_module` has cut inside each replica.

    The pieces of a gradient travel to the TP owner, and those of the update back, as in `dedicate_params`.
    The other parameters, whole or in pieces, go to `replicate_tp` afterwards.

    Arguments and errors are those of `dedicate_params_ddp` and, for `tp_buffer_reuse`, of `dedicate_params`.
    Parameters that nothing has cut are welcome too.
    """
    layout = DataParallelLayout.from_meshes(mesh, ddp=True)
    options = _options(False, mp_policy, master_dtype, hook_boundary, process_groups, tp_buffer_reuse)
    return _dedicate(model, layout, options, predicate, structure)


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Keep the parameters that are not dedicated equal on all ranks of `mesh`; call it after
    `dedicate_params_ddp`.

    It calls `fully_shard` on the blocks and the model, with a mesh whose rows have one rank: nothing is cut
    or gathered, gradients are averaged during every backward, and all that holds for FSDP2 holds
    (`set_requires_gradient_sync`, say). Parameters and buffers start as the first rank's, from `Muon` or the
    first forward on. Buffers that change in training are each rank's own.

    Returns:
        The model, its parameters replaced as `fully_shard` does.

    Raises:
        ValueError: for a model without DDP's dedicated parameters, another mesh than theirs, a second call,
            or a parameter that tensor parallelism has cut (see `replicate_tp`).
    """
    _replicate(model, mesh, cut_goes_to="dmuon.replicate_tp")
    return model


def replicate_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`replicate` for a model that `parallelize_module` has cut: every rank averages its own pieces with the
    same pieces of the other replicas. Call it after `dedicate_params_ddp_tp`.

    Raises:
        ValueError: as `replicate`.
    """
    _replicate(model, mesh, cut_goes_to=None)
    return model


def _dedicate(
    model: nn.Module,
    layout: DataParallelLayout,
    options: Options,
    predicate: Predicate | None,
    structure: StructureSpec | None,
    *,
    cut_goes_to: str | None = None,
) -> list[DedicatedParam]:
    """Choose, assign, install; the same for every layout.

    cut_goes_to: the call that takes parameters cut by tensor parallelism, if this one does not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if predicate is not None and not callable(predicate):
        raise TypeError(f"predicate must be a function (name, parameter) -> bool, got {predicate!r}")
    if has_runtime(model) or any(record_of(p) is not None for p in model.parameters()):
        raise ValueError(
            "dedicate_params was already called on this model, on a part of it or around it. Call it once, "
            "on the whole model; one predicate can choose from all of it."
        )
    chosen = chosen_parameters(model, predicate)
    check_choice(model, chosen)
    warn_of_choice(model, chosen, by_predicate=predicate is not None)
    structures = structures_of(chosen, structure, model)
    stacks = [] if layout.is_ddp else [c for c in chosen if _needs_no_owner(c, structures[c])]
    chosen = [candidate for candidate in chosen if candidate not in stacks]
    if not chosen:
        raise ValueError(
            f"nothing to dedicate but stacks of matrices ({stacks[0].name}, ...), which stay where they are. "
            "Choose a matrix besides."
        )
    cuts = _tensor_parallel_cuts(chosen, layout)
    if cut_goes_to is not None:
        for candidate, cut in zip(chosen, cuts, strict=True):
            if cut is not None and cut.size > 1:
                raise ValueError(f"{candidate.name} is cut by tensor parallelism: call {cut_goes_to} instead")
    kinds = [structures[candidate].matrices(candidate.param.shape) for candidate in chosen]
    tp_groups = [cut.ranks if cut is not None else () for cut in cuts]
    matrices = matrices_of(kinds, blocks_of(model, chosen))
    loads = _loads_of([(c.param, structures[c]) for c in stacks], layout)
    slots, tp_owners = choose_owners(matrices, layout.size, tp_groups, loads=loads)
    params = [
        DedicatedParam(
            c.name,
            c.module,
            c.attribute,
            layout,
            layout.owner_of_slot(slot),
            tp,
            tp_owner,
            options.master_dtype,
            structures[c],
        )
        for c, slot, tp, tp_owner in zip(chosen, slots, cuts, tp_owners, strict=True)
    ]
    in_place = [Stack(c.name, c.module, c.attribute, structures[c]) for c in stacks]
    runtime = Runtime(model, layout, params, options, in_place)
    install_model_hooks(params)
    refuse_late_calls(runtime)
    if layout.is_ddp:
        hide_from_ddp(runtime)
    return params


def _replicate(model: nn.Module, mesh: DeviceMesh, cut_goes_to: str | None) -> None:
    runtime = find_runtime(model)
    layout = runtime.layout
    if not layout.is_ddp:
        raise ValueError(
            "the model went through dmuon.dedicate_params: its other parameters are for fully_shard. For "
            "DDP, call dmuon.dedicate_params_ddp (or dedicate_params_ddp_tp) instead."
        )
    if not isinstance(mesh, DeviceMesh) or mesh.mesh.flatten().tolist() != layout.given.mesh.tolist():
        raise ValueError(
            f"pass the mesh that dedicate_params_ddp was given, over the ranks {list(layout.column)}"
        )
    if fsdp.sharded_modules(runtime.model):
        raise ValueError(
            "the model's other parameters are replicated already; call it once, on the whole model"
        )
    if runtime.is_sealed:
        raise ValueError("call it before dmuon.Muon and the first forward, after dedicate_params_ddp")
    for name, param in runtime.model.named_parameters():
        if runtime.record_of(param) is not None or not isinstance(param, DTensor):
            continue
        if set(param.device_mesh.mesh.flatten().tolist()) & set(layout.column) != {dist.get_rank()}:
            raise ValueError(
                f"{name} is a DTensor over data-parallel ranks, which keep it whole under DDP: cut it over "
                'other mesh dims, such as mesh["tp"], or not at all.'
            )
        if cut_goes_to is not None and TensorParallel.of(param).size > 1:
            raise ValueError(f"{name} is cut by tensor parallelism: call {cut_goes_to} instead")
    shard_over_rows_of_one(runtime.model, layout)
    refuse_second_average(runtime.model)
    dedicated = {id(param.resting) for param in runtime.params}
    runtime.on_seal.append(FirstRankWins(runtime.model, dedicated, layout))


def dedicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The dedicated parameters themselves, for `fully_shard(..., ignored_params=...)`.

    `fully_shard` leaves them alone without it; it is for code that wraps modules in ways of its own.
    """
    return {param.resting for param in find_runtime(model).params}


def _options(
    reshard_after_forward: bool | None,
    mp_policy: MixedPrecisionPolicy | None,
    master_dtype: torch.dtype | None,
    hook_boundary: HookBoundary | None,
    process_groups: ProcessGroups,
    tp_buffer_reuse: BufferReuse = False,
) -> Options:
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {type(mp_policy).__name__}")
    if not (
        master_dtype is None or (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point)
    ):
        raise ValueError(f"master_dtype must be a floating-point dtype, got {master_dtype!r}")
    if process_groups not in get_args(ProcessGroups):
        raise ValueError(f"process_groups must be one of {get_args(ProcessGroups)}, got {process_groups!r}")
    if not any(tp_buffer_reuse is value for value in (True, False)) and tp_buffer_reuse not in _REUSE:
        raise ValueError(f"tp_buffer_reuse must be True, False or one of {_REUSE}, got {tp_buffer_reuse!r}")
    return Options(
        reshard_after_forward=reshard_after_forward,
        precision=None if mp_policy is None else Precision(mp_policy.param_dtype, mp_policy.reduce_dtype),
        hook_boundary=_boundary_chooser(hook_boundary),
        master_dtype=master_dtype,
        process_groups=process_groups,
        reuse_gather=tp_buffer_reuse in (True, "all", "gather"),
        reuse_scatter=tp_buffer_reuse in (True, "all", "scatter"),
    )


def _boundary_chooser(hook_boundary: HookBoundary | None) -> Callable[[str, nn.Module], bool] | None:
    if hook_boundary is None:
        return None
    classes = hook_boundary if isinstance(hook_boundary, tuple) else (hook_boundary,)
    if all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda name, module: isinstance(module, classes)  # type: ignore[arg-type]
    if callable(hook_boundary) and not isinstance(hook_boundary, type):
        return hook_boundary
    raise TypeError(
        f"hook_boundary must be module classes or a function (name, module), got {hook_boundary!r}"
    )


def _needs_no_owner(candidate: Candidate, structure: Structure) -> bool:
    """Whether its matrices stay whole where FSDP2 puts them: a stack, unless something cuts inside."""
    param = candidate.param
    whole = not isinstance(param, DTensor) or lies_whole(param, structure)
    return structure.stacked(param.shape) > 0 and whole


def _loads_of(stacks: Sequence[tuple[nn.Parameter, Structure]], layout: DataParallelLayout) -> list[int]:
    """Operations that each slot has to do for stacks."""
    seen = (
        (param.shape[0], cost_of(structure.matrices((1, *param.shape[1:]))), isinstance(param, DTensor))
        for param, structure in stacks
    )
    return loads_of_stacks(seen, layout.shard_size, layout.replicate_size)


def _tensor_parallel_cuts(chosen: list[Candidate], layout: DataParallelLayout) -> list[TensorParallel | None]:
    """How tensor parallelism holds each parameter; one object for all that are cut alike."""
    known: dict[tuple, TensorParallel | None] = {}
    cuts = []
    for candidate in chosen:
        cut = None
        if isinstance(param := candidate.param, DTensor):
            key = (param.device_mesh, param.placements, param.shape)
            if key not in known:
                known[key] = _tensor_parallel(candidate, layout)
            cut = known[key]
        cuts.append(cut)
    return cuts


def _tensor_parallel(candidate: Candidate, layout: DataParallelLayout) -> TensorParallel | None:
    """How tensor parallelism holds a parameter; None for a plain one. Refuses what does not fit the mesh."""
    name, param = candidate.name, candidate.param
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    if mesh.mesh_dim_names is None or layout.mesh.mesh_dim_names is None:
        which = "its" if mesh.mesh_dim_names is None else "the data-parallel"
        raise ValueError(
            f"{name} is a DTensor, and {which} mesh has no mesh_dim_names, so that tensor-parallel dims "
            "cannot be told from data-parallel ones. Name the dims of the root mesh: init_device_mesh(..., "
            'mesh_dim_names=("dp", "tp")).'
        )
    if mesh == layout.mesh:
        return None  # cut over the data-parallel dims alone: it stands for the whole tensor
    shared = set(mesh.mesh_dim_names) & set(layout.mesh.mesh_dim_names)
    if shared:
        raise ValueError(
            f"{name} is a DTensor over the mesh dims {mesh.mesh_dim_names}, of which {sorted(shared)} are in "
            f"the data-parallel mesh {layout.mesh.mesh_dim_names} too. Pass the data-parallel slice of the "
            'mesh to dedicate_params, such as mesh["dp"], and apply tensor parallelism on the other dims.'
        )
    root, names = root_mesh(layout.mesh), mesh.mesh_dim_names
    if root_mesh(mesh) != root and set(names) <= set(root.mesh_dim_names or ()) and root[names] == mesh:
        mesh = root[names]  # DTensor's caches confuse meshes that are equal: an earlier one has come back
    if root_mesh(mesh) != root:
        raise ValueError(
            f"{name} is a DTensor on a mesh of another root than the data-parallel mesh. Slice both from one "
            'init_device_mesh: mesh["dp"] and mesh["tp"].'
        )
    if len(set(mesh.mesh.flatten().tolist()) & set(layout.mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(
            f"{name} is a DTensor over the mesh dims {mesh.mesh_dim_names}, whose ranks are data-parallel "
            "too. There, only stacks of matrices can be had, cut along leading dims, not "
            f"{param.placements}. Leave tensor parallelism out of the experts, or leave them to AdamW by the "
            "predicate."
        )
    for placement in param.placements:
        if not (placement.is_shard() or placement.is_replicate()):
            raise ValueError(
                f"{name} has the placements {param.placements}; only Shard and Replicate can be dedicated. "
                "Redistribute it first, or leave it out by predicate."
            )
    ranks_by_group(layout.with_tp(mesh))  # refuses an order in which an owner row is not one TP group
    tp = TensorParallel.of(param, mesh)
    is_even = len({tp.shape_of(position) for position in range(tp.size)}) == 1
    if not (is_even or torch.equal(mesh.mesh, ranks_by_group(mesh))):
        raise ValueError(
            f"{name} is cut into pieces of different sizes by ranks that do not ascend, {mesh}: torch takes "
            "such pieces for each other. Let the ranks of a mesh ascend, as init_device_mesh does."
        )
    return tp


def full_tensor(param: torch.Tensor) -> torch.Tensor:
    """The whole value of a parameter, on every rank; collective over the ranks that share it.

    Works alike on dedicated parameters, on FSDP2's and any other evenly sharded DTensor, and on plain
    tensors, which are returned as they are. Of a dedicated parameter it takes the parameter itself, not its
    `.data` or `.grad`: see `DedicatedParam.local_gradient` for the latter.

    Raises:
        RuntimeError: if the model that a dedicated parameter belonged to is gone.
    """
    return param.full_tensor() if isinstance(param, DTensor) else param
