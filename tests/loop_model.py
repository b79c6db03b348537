"""The model of the random training loops, and the calls that distribute it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import dmuon
from loops import Loop, Sizes, Use

INPUTS, OUTPUTS = 5, 3


class Interrupted(Exception):
    """Raised by a layer, and caught by the loop."""


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, has_base: bool, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.norm = nn.LayerNorm(width) if has_base else nn.Identity()
        self.mix_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=has_base)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.spare_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, spare: bool, fails: bool) -> Any:
        y = x + self.mix_proj(self.norm(x))
        if spare:
            y = y + self.spare_proj(y)
        up = torch.tanh(self.up_proj(y))
        if fails:
            raise Interrupted
        y = y + self.down_proj(up)
        return {"h": [y]} if self.nested else y


class Routed(nn.Module):
    """Runs the layers that it is told to run."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.nested = loop.nested_output
        self.stem_proj = nn.Linear(INPUTS, loop.width, bias=False)
        self.layers = nn.ModuleList(
            Layer(loop.width, hidden, loop.has_base, loop.nested_output) for hidden in loop.hidden
        )
        self.head = nn.Linear(loop.width, OUTPUTS)

    def forward(
        self, x: torch.Tensor, use: Use, recompute: str = "no", fails: int | None = None
    ) -> torch.Tensor:
        x = self.stem_proj(x)
        for number, index in enumerate(use.route):
            args = (x, index in use.spare, number == fails)
            layer = self.layers[index]
            if recompute == "no":
                x = layer(*args)
            else:
                x = checkpoint(layer, *args, use_reentrant=recompute == "reentrant")
            if isinstance(x, dict):
                x = x["h"][0]
        return self.head(x)


def model_of(loop: Loop, seed: int) -> Routed:
    torch.manual_seed(seed)
    model = Routed(loop)
    if loop.double:
        model.double()
    for name in loop.frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


PLAN = {"up_proj": ColwiseParallel(use_local_output=False), "down_proj": RowwiseParallel()}


def distribute(model: Routed, loop: Loop, sizes: Sizes, mesh: DeviceMesh) -> None:
    if "tp" in sizes:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    options: dict[str, Any] = {"predicate": is_proj, "process_groups": loop.process_groups}
    if "ddp" in sizes:
        if loop.wrap == "root":
            options["hook_boundary"] = lambda name, module: name == ""
        if "tp" in sizes:
            dmuon.dedicate_params_ddp_tp(model, mesh["dp"], tp_buffer_reuse=loop.reuse, **options)
            dmuon.replicate_tp(model, mesh["dp"])
        else:
            dmuon.dedicate_params_ddp(model, mesh["dp"], **options)
            dmuon.replicate(model, mesh["dp"])
        return
    options |= {"reshard_after_forward": loop.reshard, "tp_buffer_reuse": loop.reuse}
    if "replicate" in sizes:
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"], **options)
        dp = mesh["replicate", "shard"]
    else:
        dmuon.dedicate_params(model, mesh["dp"], **options)
        dp = mesh["dp"]
    if loop.wrap == "layers":
        for layer in model.layers:
            fully_shard(layer, mesh=dp, reshard_after_forward=loop.reshard)
    fully_shard(model, mesh=dp, reshard_after_forward=loop.reshard)
