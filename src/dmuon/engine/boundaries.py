"""The modules at whose forward a group is gathered; whether model and `fully_shard` still agree with us."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch.nn as nn

from ..selection import block_modules, clean_name, enclosing, is_callable
from . import fsdp
from .layout import DataParallelLayout
from .parameter import DedicatedParam


def hook_boundaries(
    model: nn.Module, choose: Callable[[str, nn.Module], bool] | None
) -> dict[str, nn.Module]:
    """Modules at whose forward a group is gathered, by name, in module order; always with the root.

    choose: says so of a name and a module; None follows `fully_shard`, or else the blocks.

    Raises:
        ValueError: for a chosen module that has no forward.
    """
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module]
    if choose is not None:
        chosen = {name: module for name, module in modules.items() if choose(name, module)}
        for name, module in chosen.items():
            if not is_callable(module):
                raise ValueError(
                    f"hook_boundary selects {name}, a {type(module).__name__}, which has no forward that "
                    "could be hooked; select its elements"
                )
    else:
        chosen = fsdp.sharded_modules(model) or block_modules(model)
    return {name: module for name, module in modules.items() if name in chosen or name == ""}


def homes(model: nn.Module, boundaries: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """For each module the innermost boundary that contains it, in all its places if several modules share it.

    boundaries: by name, with the root.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in boundaries.items()}
    around: dict[str, tuple[str, ...]] = {}  # by path: the boundaries that contain it, the root first
    common: dict[nn.Module, tuple[str, ...]] = {}
    for path, module in paths.items():  # parents before their children
        outer = around[path.rpartition(".")[0]] if path else ()
        around[path] = (*outer, names[module]) if module in names else outer
        known = common.get(module, around[path])
        common[module] = tuple(name for name in known if name in around[path])
    return {module: containing[-1] for module, containing in common.items()}


class Presence:
    """Whether the modules of dedicated parameters are still part of the model: what came instead of one would
    not be trained. Asked in every step, it goes by the links it has found, not over all modules."""

    def __init__(self, model: nn.Module, params: Sequence[DedicatedParam]) -> None:
        self._model = model
        self._params = params
        self._links: list[tuple[nn.Module, str, nn.Module]] = []

    def check(self, *, may_be_removed: bool) -> None:
        """
        may_be_removed: as long as nothing is in its place.

        Raises:
            RuntimeError: with the parameter's name.
        """
        if self._are_linked():
            return
        modules = dict(self._model.named_modules())
        present = set(modules.values())
        for param in self._params:
            if param.module in present:
                continue
            if not may_be_removed or param.param_name.rpartition(".")[0] in modules:
                raise RuntimeError(
                    f"{param.param_name} is a dedicated parameter, but its module is no longer a part of the "
                    "model. Replace modules before dmuon.dedicate_params; afterwards change weights in place "
                    "(under torch.no_grad())."
                )
        self._check_places(modules)
        holders = {param.module for param in self._params}
        around = {name for name, module in modules.items() if module in holders}
        for name in list(around):
            while name:
                name = name.rpartition(".")[0]
                around.add(name)
        self._links = [
            (modules[outer], own, modules[name])
            for name in around
            if name
            for outer, _, own in [name.rpartition(".")]
        ]

    def check_places(self) -> None:
        """As `check` for what stands in another place than it did, alone.

        Raises:
            RuntimeError: with the parameter's name.
        """
        if not self._are_linked():
            self._check_places(dict(self._model.named_modules()))

    def _are_linked(self) -> bool:
        return bool(self._links) and all(
            outer._modules.get(name) is inner for outer, name, inner in self._links
        )

    def _check_places(self, modules: Mapping[str, nn.Module]) -> None:
        paths = {module: name for name, module in modules.items()}
        for param in self._params:
            path = clean_name(f"{paths[param.module]}.{param.attribute}") if param.module in paths else None
            if path is not None and path.removeprefix(".") != param.param_name:
                raise RuntimeError(
                    f"{param.param_name} is a dedicated parameter, and stands at {path} now: what has been "
                    "put around it would not be trained. Put adapters in first (PEFT's get_peft_model), then "
                    "call dmuon.dedicate_params, fully_shard and dmuon.Muon."
                )


def check_sharding(model: nn.Module, layout: DataParallelLayout, params: Iterable[DedicatedParam]) -> None:
    """Refuse a `fully_shard` that does not go together with the dedicated parameters.

    Raises:
        ValueError: if it averages gradients over other ranks, or offloads to the CPU.
    """
    ours = layout.mesh.mesh.flatten().tolist()
    fitting = {layout.mesh}
    sharded = fsdp.sharded_modules(model)
    paths = {module: name for name, module in model.named_modules()}  # as wrappers may have changed them
    offloaded = [name for name, module in sharded.items() if fsdp.offloads_to_cpu(module)]
    if offloaded:
        raise ValueError(
            f"{offloaded[0] or 'the model'} is wrapped by fully_shard with a CPUOffloadPolicy. Dedicated "
            "parameters and their momentum stay on the device, on their owners: leave offload_policy out."
        )
    for param in params:
        around = enclosing(paths[param.module], sharded)
        mesh = fsdp.data_parallel_mesh(sharded[around]) if around is not None else None
        if mesh is None or mesh in fitting:
            continue
        if layout.is_ddp:
            raise ValueError(
                f"{paths[param.module]} is wrapped by fully_shard, but its dedicated parameters were chosen "
                "for DDP. Use dmuon.dedicate_params with fully_shard, or dmuon.replicate in its place."
            )
        theirs = mesh.mesh.flatten().tolist()
        if sorted(theirs) != sorted(ours):
            raise ValueError(
                f"{param.param_name} was given to dedicate_params with a mesh of the ranks {ours}, and "
                f"to fully_shard with one of the ranks {theirs}. Give both the same data-parallel mesh; "
                'for HSDP, dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"]).'
            )
        fitting.add(mesh)
