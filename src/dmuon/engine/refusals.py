"""Calls of torch that come too late, or do not go with dmuon, refused by the parameter's name.

Each of them first looks for a note of its own on the module, of whether it has been there before. What we
leave in that place raises when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule

from .parameter import DedicatedParam
from .runtime import Runtime

_DDP = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel goes over these names first of all
_TENSOR_PARALLEL = "_distribute_module_applied"  # distribute_module, and so parallelize_module, asks for it


def refuse_late_calls(runtime: Runtime) -> None:
    """From now on, `parallelize_module` of a module with dedicated parameters raises, and `fully_shard` of
    one around them, once it would find them; with FSDP2, torch's DDP of the model as well."""
    model, params = runtime.model, runtime.params
    modules = dict(model.named_modules())
    paths = {module: path for path, module in modules.items()}
    if not runtime.layout.is_ddp:
        name = params[0].param_name
        error = RuntimeError(
            f"{name} is dedicated by dmuon.dedicate_params, which goes with fully_shard and not with "
            "DistributedDataParallel. For that, call dmuon.dedicate_params_ddp in its place."
        )
        model.__dict__[_DDP] = _Note(error)
    inside: dict[nn.Module, list[DedicatedParam]] = {}  # of each module around them
    for param in params:
        path = paths[param.module]
        inside.setdefault(modules[path], []).append(param)
        error = RuntimeError(
            f"{param.param_name} is a dedicated parameter, whole on its owner, and cannot be cut now. Call "
            "parallelize_module first, then dmuon.dedicate_params (dedicate_params_ddp_tp for DDP), "
            "fully_shard (replicate_tp) and dmuon.Muon."
        )
        param.module.__dict__[_TENSOR_PARALLEL] = _Note(error)
        while path:
            path = path.rpartition(".")[0]
            inside.setdefault(modules[path], []).append(param)
    for module, held in inside.items():
        known = module.__dict__.get(REGISTRY_KEY, {})
        module.__dict__[REGISTRY_KEY] = _Registry(known, _check_in_time(runtime, module, held))


def hide_from_ddp(runtime: Runtime) -> None:
    """Leave the dedicated parameters to us when `DistributedDataParallel(model)` is built."""
    model = runtime.model
    resting = {id(param.resting) for param in runtime.params}
    names = [name for name, param in model.named_parameters() if id(param) in resting]
    model.__dict__[_DDP] = [*getattr(model, _DDP, ()), *names]


def refuse_second_average(model: nn.Module) -> None:
    """Let `DistributedDataParallel(model)` raise: base gradients are averaged already."""
    error = RuntimeError(
        "dmuon.replicate averages the gradients of base parameters already: DistributedDataParallel around "
        "the model would find none. Leave out one of the two."
    )
    model.__dict__[_DDP] = _Note(error)


def _check_in_time(runtime: Runtime, module: nn.Module, params: list[DedicatedParam]) -> Callable[[], None]:
    def check() -> None:
        if runtime.is_sealed or isinstance(runtime.model, FSDPModule):
            raise RuntimeError(
                f"{params[0].param_name} is a dedicated parameter, and its model has been wrapped as a "
                "whole, run, or given to dmuon.Muon already: fully_shard would cut it now. The order is: "
                "dmuon.dedicate_params, fully_shard of the layers, then of the model, then dmuon.Muon."
            )
        held = {id(param) for inner in module.modules() for param in inner._parameters.values()}
        hidden = {param.module for param in params}.issubset(module.modules())
        if not hidden or not held.issuperset(id(param.resting) for param in params):
            runtime.check()  # something else is in its place, and would be cut

    return check


class _Note:
    """In place of what torch has noted: raises, however it is read."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def _refuse(self) -> NoReturn:
        raise RuntimeError(*self._error.args)

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __bool__(self) -> bool:
        self._refuse()


class _Registry(OrderedDict):
    """The composable calls that a module has seen; each asks whether it is among them before all else."""

    def __init__(self, known: dict, check: Callable[[], None]) -> None:
        super().__init__(known)
        self._check = check

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            self._check()
        return super().__contains__(name)
