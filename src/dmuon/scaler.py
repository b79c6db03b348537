"""Loss scaling where gradients lie on several meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .engine.parameter import reduce_what_is_due


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models whose gradients are not all DTensors on one mesh.

    torch's own looks for infinities over the mesh of the first gradient alone, and does not take DTensors
    together with plain tensors. That is enough for FSDP2 and HSDP; under tensor parallelism a rank could skip
    a step that another one takes, and under DDP it raises. This one looks at each kind of gradient by itself
    and lets all ranks of the default process group decide as one, by one small all-reduce.

    Constructor and methods are torch's. Call them on all ranks.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        every = [param for group in optimizer.param_groups for param in group["params"]]
        reduce_what_is_due(every)
        kinds: dict[Any, list[torch.Tensor]] = {}
        for param in every:
            if param.grad is not None:
                mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
                kinds.setdefault(mesh, []).append(param)
        found: dict[torch.device, torch.Tensor] = {}
        for params in kinds.values():
            part = _Params(params)
            flags = super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
            for device, flag in flags.items():
                found[device] = torch.maximum(found[device], flag) if device in found else flag
        if dist.is_initialized():
            for flag in found.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return found


class _Params:
    """Some parameters of an optimizer, as `GradScaler` reads them."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": params}]
