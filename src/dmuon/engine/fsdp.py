"""The base parameters, which stay with FSDP2: the one file that knows how FSDP2 works.

FSDP2 lists a module's parameters through `module.named_parameters(recurse=False)`. From `dedicate_params`
until the model itself is an `FSDPModule` (or is run), that one call leaves the dedicated ones out on the
modules that hold them, by an instance attribute; every other way to list parameters shows them all the
time. No longer: the same call is the one by which frameworks initialise and load.
`fully_shard(ignored_params=...)` does the same if the user passes `dmuon.dedicated_parameters(model)`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from ..selection import clean_name


@dataclass(frozen=True)
class Schedule:
    """What a wrapped module was told about its next backward, by FSDP2's `set_...` methods.

    Attributes:
        reduce: reduce gradients at all (`set_requires_gradient_sync`).
        all_reduce: under HSDP, reduce them over the replicas as well (`set_requires_all_reduce`).
        reshard: free the full weights afterwards (`set_reshard_after_backward`).
        divisor: what sums are divided by (`set_gradient_divide_factor`); None: the number of ranks.
    """

    reduce: bool = True
    all_reduce: bool = True
    reshard: bool = True
    divisor: float | None = None


def hide_from_fully_shard(module: nn.Module, attributes: set[str], root: nn.Module) -> None:
    """Leave `attributes` out of `module.named_parameters(recurse=False)`, until `root` is wrapped."""

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        # The class is looked up at the call: fully_shard changes it.
        every = type(module).named_parameters(module, prefix, recurse, remove_duplicate)
        over = recurse or isinstance(root, FSDPModule)
        hidden = set() if over else {id(module._parameters[name]) for name in attributes}
        yield from ((name, param) for name, param in every if id(param) not in hidden)

    module.__dict__["named_parameters"] = named_parameters


def unhide(module: nn.Module) -> None:
    """Undo `hide_from_fully_shard`."""
    module.__dict__.pop("named_parameters", None)


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `fully_shard` wraps, by name, outermost first."""
    return {name: module for name, module in model.named_modules() if issubclass(type(module), FSDPModule)}


def managed_parameters(model: nn.Module) -> set[int]:
    """`id` of every parameter that `fully_shard` has taken, whether it is sharded or gathered just now."""
    managed: set[int] = set()
    for module in sharded_modules(model).values():
        for group in _param_groups(module):
            for param in group.fsdp_params:
                managed.add(id(param.sharded_param))
                managed.add(id(getattr(param, "_unsharded_param", None)))
    managed.discard(id(None))
    return managed


def reshards_after_forward(module: nn.Module | None, root: nn.Module) -> bool:
    """Whether a module wrapped by `fully_shard` frees its weights between forward and backward.

    As for FSDP2, the outermost module does not unless it was told to. A module without parameters of its own
    has nowhere to keep what it was told, and frees them.
    """
    if module is None:
        return True
    for group in _param_groups(module):
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        is_root_by_default = module is root and getattr(state, "_auto_reshard_after_forward", False)
        return group.post_forward_mesh_info is not None and not is_root_by_default
    return module is not root


def _param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's own groups of a wrapped module's parameters; one at most before torch 2.11."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def mixed_precision(module: nn.Module) -> MixedPrecisionPolicy:
    """The policy that a module wrapped by `fully_shard` was given."""
    return fully_shard.state(module)._mp_policy  # type: ignore[attr-defined]


def offloads_to_cpu(module: nn.Module) -> bool:
    """Whether a module wrapped by `fully_shard` keeps its parameters on the CPU."""
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _param_groups(module))


def data_parallel_mesh(module: nn.Module) -> DeviceMesh | None:
    """The mesh that a module wrapped by `fully_shard` is sharded over; None if it has no parameter."""
    for group in _param_groups(module):
        return group.mesh_info.mesh
    return None


def schedule(module: nn.Module | None) -> Schedule:
    """The schedule of a module wrapped by `fully_shard`; of one without parameters, or None, the default."""
    for group in _param_groups(module) if module is not None else ():
        return Schedule(
            reduce=group.reduce_grads,
            all_reduce=group.all_reduce_grads,
            reshard=group.reshard_after_backward,
            divisor=group.gradient_divide_factor,
        )
    return Schedule()


def has_parameters(module: nn.Module) -> bool:
    """Whether `fully_shard` has found parameters in a module that it wraps; only then it has a schedule."""
    return bool(_param_groups(module))


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Base gradients are not reduced in backwards inside; what held before holds again afterwards."""
    before = []
    for module in sharded_modules(model).values():
        if has_parameters(module):
            before.append((module, schedule(module)))
            module.set_requires_gradient_sync(False, recurse=False)  # type: ignore[operator]
    try:
        yield
    finally:
        for module, old in before:
            module.set_requires_gradient_sync(old.reduce, recurse=False)  # type: ignore[operator]
            module.set_requires_all_reduce(old.all_reduce, recurse=False)  # type: ignore[operator]


def call_when_reduced(model: nn.Module, method: Callable[[torch.Tensor], None]) -> None:
    """Call a method whenever FSDP2 has reduced the gradient of a parameter, which is trainable now."""
    # A weak reference: the garbage collector does not see what these hooks keep alive.
    reference = weakref.WeakMethod(method)

    def callback(gradient: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(gradient)

    for module in sharded_modules(model).values():
        for group in _param_groups(module):
            for param in group.fsdp_params:
                if param.sharded_param.requires_grad:
                    param.sharded_param.register_post_accumulate_grad_hook(callback)


def unreduced(model: nn.Module) -> str | None:
    """A base parameter with gradients that are not reduced, or not over the replicas; None: there is none."""
    for module in sharded_modules(model).values():
        for group in _param_groups(module):
            for param in group.fsdp_params:
                mine = getattr(param, "_unsharded_param", None)
                waits = param.unsharded_accumulated_grad is not None
                if (
                    waits
                    or group._partial_reduce_output is not None
                    or getattr(mine, "grad", None) is not None
                ):
                    return clean_name(param._param_fqn or "a parameter of fully_shard")
    return None


def reduce_due(model: nn.Module) -> None:
    """Reduce base gradients that backwards without reduction have left, where the switches ask for it by now.

    As torch's pipelining does; on all ranks. What waits for the replicas alone stays: that takes a backward.
    """
    if unreduced(model) is None:
        return
    for module in sharded_modules(model).values():
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        if state._is_root:
            for part in sharded_modules(module).values():
                for group in _param_groups(part):
                    group.post_backward()
            state._root_post_backward_final_callback()


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Forget the base gradients that backwards without reduction have left with FSDP2."""
    for module in sharded_modules(model).values():
        for group in _param_groups(module):
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                    unsharded.grad = None


def forget_backward(model: nn.Module) -> None:
    """Bring FSDP2 to where it stands between iterations, after a backward that raised.

    It gets there by itself only at the end of a backward: else it would never again reduce gradients of
    modules whose inputs want none, such as an embedding. Gradients that it has not reduced are dropped.
    """
    drop_unreduced_gradients(model)
    for module in sharded_modules(model).values():
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        if state._is_root is None:
            continue  # it has never run, and has nothing to forget yet
        for part in (state, *_param_groups(module)):
            part._training_state = type(part._training_state).IDLE
        for group in _param_groups(module):
            group.finalize_backward()
        getattr(state, "_modules_to_run_forward", set()).clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Bring base parameters back to their sharded form, such as after an evaluation without gradients."""
    for module in sharded_modules(model).values():
        module.reshard()  # type: ignore[operator]


def accumulates_into(params: Iterable[nn.Parameter | None]) -> bool:
    """Inside a backward: whether it will add to the gradient of any of these.

    Not in one for the gradients of other tensors (`torch.autograd.grad`), nor for weights that its graph does
    not use. A private name of torch's; without it, what such a backward leaves out would not be noticed.
    """
    edges = (torch.autograd.graph.get_gradient_edge(p) for p in params if p is not None and p.requires_grad)
    return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
