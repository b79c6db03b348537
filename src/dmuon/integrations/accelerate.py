"""dmuon for accelerate, whose `prepare` wants the optimizer before it wraps the model.

accelerator = Accelerator(...)
optimizer = muon(model, lr=0.02, adamw_lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from ..api import dedicate_params, dedicate_params_ddp
from ..engine import fsdp
from ..engine.parameter import record_of
from ..optim.muon import Muon
from ..selection import Predicate, clean_name

_DDP = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU}


def muon(model: nn.Module, *, predicate: Predicate | None = None, **settings: Any) -> Muon:
    """Dedicate the matrices of a model and make its optimizer, for `Accelerator.prepare(model, optimizer)`.

    Call it on all ranks, with the `Accelerator` built and the model not prepared. Under FSDP2 the matrices
    are dedicated now, and the optimizer gets its parameters when `prepare` has wrapped the model; until then
    its groups have learning rates (for schedulers), but no parameters. Under DDP it is complete at once.

    What only the first rank has loaded (`cpu_ram_efficient_loading`) is sent to all ranks here.

    Args:
        model: the whole model, as it will go to `prepare`.
        predicate: as for `dedicate_params`.
        settings: of `Muon`; in `param_groups`, parameters go by name, since `prepare` replaces them.

    Returns:
        The optimizer.

    Raises:
        RuntimeError: if there is no `Accelerator` yet.
        ValueError: for what accelerate would do that dmuon does not go with (FSDP1, DeepSpeed, offloading to
            the CPU, tensor parallelism by `prepare`), and what `dedicate_params` and `Muon` refuse.
    """
    if not AcceleratorState._shared_state:
        raise RuntimeError("build the Accelerator first: dmuon reads its mesh and its FSDP plugin")
    state = AcceleratorState()
    if fsdp.sharded_modules(model):
        raise ValueError(
            "the model is wrapped by fully_shard already: let accelerate wrap it, or call "
            "dmuon.dedicate_params, fully_shard and dmuon.Muon yourself, without accelerate's prepare"
        )
    if state.distributed_type in _DDP:
        dedicate_params_ddp(model, _world_mesh(state), predicate=predicate)
        return Muon(model, **settings)
    plugin = _fsdp2_plugin(state)
    mesh = _fsdp_mesh(state)
    if state.mixed_precision != "no":  # as `prepare` does to what it wraps
        for param in model.parameters():
            if param.requires_grad:
                param.data = param.data.to(torch.float32)
    if plugin.cpu_ram_efficient_loading:
        _send_from_first_rank(model, state.device)
        plugin.cpu_ram_efficient_loading = False  # it is done; accelerate would go by the meta device
    dedicate_params(model, mesh, predicate=predicate)
    return LateMuon(model, **settings)


class LateMuon(Muon):
    """`Muon` for a model that is not wrapped yet: it gets its parameters once `prepare` is over.

    accelerate exchanges the parameters of an optimizer by the addresses of their data, which a rank does not
    have of matrices that it does not own. So it finds none to exchange.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._waiting = True
        self._late = (model, settings)
        Optimizer.__init__(self, _groups_to_come(model, settings), {})
        # accelerate puts new lists in their place, at the end of `prepare`.
        self._given = [group["params"] for group in self.__dict__["param_groups"]]
        self.register_step_pre_hook(lambda optimizer, args, kwargs: self._check())
        self.defaults = {"momentum": settings.get("momentum", 0.95)}

    def _check(self) -> None:
        self._be()
        if self._waiting:
            raise RuntimeError(
                "step() before Accelerator.prepare: give prepare the model and this optimizer, in one call"
            )

    def _be(self) -> None:
        """Become complete, if the model has been wrapped and accelerate has exchanged parameters."""
        if not self._waiting or not fsdp.sharded_modules(self._late[0]):
            return
        groups = self.__dict__["param_groups"]
        if any(group["params"] is given for group, given in zip(groups, self._given, strict=True)):
            return  # prepare is still at it
        self._waiting = False
        hooks = {name: value for name, value in self.__dict__.items() if name.endswith("_hooks")}
        model, settings = self._late
        Muon.__init__(self, model, **settings)
        for group, before in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})
        for name, before in hooks.items():
            ours = self.__dict__[name]
            ours.update({key: hook for key, hook in before.items() if key not in ours})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, without parameters before `prepare`."""
        self._be()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of each parameter; empty before `prepare`."""
        self._be()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.__dict__["state"] = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `Muon`'s."""
        self._be()
        (Optimizer if self._waiting else Muon).add_param_group(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """As `Muon`'s."""
        self._be()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Muon`'s."""
        self._be()
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `Muon`'s."""
        self._be()
        (Optimizer if self._waiting else Muon).zero_grad(self, set_to_none)


def _groups_to_come(model: nn.Module, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups that `Muon` will have, with their learning rates and without parameters."""
    rates = {"muon": settings.get("lr", 0.02), "adamw": settings.get("adamw_lr", 1e-3)}
    algorithms = {
        clean_name(name): "adamw" if record_of(param) is None else "muon"
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    rest = dict(algorithms)
    groups = []
    for group in settings.get("param_groups") or ():
        names = [name for name in group["params"] if name in rest]
        if not names or len(names) != len(group["params"]):
            raise ValueError(
                "param_groups: before Accelerator.prepare, which replaces parameters, they are given by "
                "name, and each trainable one once"
            )
        kind = algorithms[names[0]]
        mine = {key: value for key, value in group.items() if key != "params"}
        groups.append({"lr": rates[kind], **mine, "params": [], "algorithm": kind})
        for name in names:
            del rest[name]
    for kind in ("muon", "adamw"):
        if kind in rest.values():
            groups.append({"lr": rates[kind], "params": [], "algorithm": kind})
    return groups


def _fsdp2_plugin(state: AcceleratorState) -> Any:
    if state.distributed_type == DistributedType.NO:
        raise ValueError("there is one process; torch.optim.Muon does the same update")
    if not state.is_fsdp2:
        raise ValueError(
            f"accelerate is set up for {state.distributed_type.value}; dmuon goes with FSDP2 "
            "(FullyShardedDataParallelPlugin(fsdp_version=2)) and with DDP"
        )
    if isinstance(state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "the FSDP plugin has cpu_offload, and dedicated parameters stay on the device: leave it out"
        )
    return state.fsdp_plugin


def _fsdp_mesh(state: AcceleratorState) -> DeviceMesh:
    """The mesh that accelerate gives to `fully_shard`."""
    config, mesh = state.parallelism_config, state.device_mesh
    if config is None or mesh is None:
        return _world_mesh(state)
    if config.tp_enabled:
        raise ValueError(
            "accelerate applies tensor parallelism inside prepare, and matrices are dedicated before it: "
            "leave tp_size out, or call parallelize_module, dmuon.dedicate_params, fully_shard and "
            "dmuon.Muon yourself"
        )
    return mesh[tuple(config.fsdp_dim_names)]


def _world_mesh(state: AcceleratorState) -> DeviceMesh:
    return init_device_mesh(state.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


@torch.no_grad()
def _send_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Bring the first rank's parameters and buffers to all ranks, one at a time."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for tensor in tensors.values():
        whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        whole = whole.contiguous()
        dist.broadcast(whole, 0)
        if not tensor.is_meta:
            tensor.copy_(whole)
        elif isinstance(tensor, nn.Parameter):
            torch.utils.swap_tensors(tensor, nn.Parameter(whole, tensor.requires_grad))
        else:
            torch.utils.swap_tensors(tensor, whole)
