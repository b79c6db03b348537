"""Models cut by tensor parallelism, and the calls that distribute them, on every layout.

A layout is a dict of mesh dims: `dp` (or `replicate` and `shard`) for FSDP2 and HSDP, `ddp` for DDP; with
`tp` or without.
"""

import math
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from models import InnerProduct, is_proj

Sizes = dict[str, int]

FSDP_LAYOUTS = [
    pytest.param({"dp": 4}, id="dp4"),
    pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, id="hsdp2x1-tp2"),
]
DDP_LAYOUTS = [
    pytest.param({"ddp": 4}, id="ddp4"),
    pytest.param({"ddp": 2, "tp": 2}, id="ddp2-tp2"),
]
LAYOUTS = [*FSDP_LAYOUTS, *DDP_LAYOUTS]
# With `reshard_after_forward`, which means nothing under DDP.
RESIDENCIES = [
    *(
        pytest.param(*layout.values, reshard, id=f"{layout.id}-{residency}", marks=marks)
        for layout in FSDP_LAYOUTS
        for reshard, residency, marks in (
            (True, "while_used", ()),
            (False, "until_backward_done", pytest.mark.combination),
        )
    ),
    *(pytest.param(*layout.values, True, id=layout.id) for layout in DDP_LAYOUTS),
]
# Fewer of them: every layout once, and `dp4` either way.
FEWER = [*RESIDENCIES[:2], *RESIDENCIES[2:8:2], *RESIDENCIES[8:]]


class Layer(nn.Module):
    """Cut by rows (`up`, `gate`), by columns (`down`), replicated and plain matrices, in uneven pieces."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.gate_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_proj(self.norm(x))
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 13, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# Uneven pieces stay DTensors in between: torch could not tell their sizes from local tensors.
PLAN = {
    "up_proj": ColwiseParallel(use_local_output=False),
    "gate_proj": ColwiseParallel(use_local_output=False),
    "down_proj": RowwiseParallel(),
}


def make_mesh(sizes: Sizes, order: Any = None) -> DeviceMesh:
    """The mesh; DDP's dim is called "dp" on it, as users do. order: its ranks, nested; None: ascending."""
    names = tuple("dp" if name == "ddp" else name for name in sizes)
    if order is not None:
        return DeviceMesh("cpu", order, mesh_dim_names=names)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict | None = None) -> None:
    if isinstance(model.layers[0], InnerProduct):
        cut_in_turn(model, mesh)
        return
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan or plan_for(layer))


def plan_for(layer: nn.Module) -> dict:
    """A plan for a layer of any make: its Linears in turn cut by rows, by columns, and not at all.

    What goes into each and comes out of it is whole.
    """
    if isinstance(layer, Layer):
        return PLAN
    styles = cycle([(ColwiseParallel, "output_layouts"), (RowwiseParallel, "input_layouts"), None])
    linears = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    chosen = zip(linears, styles, strict=False)
    return {name: style[0](**{style[1]: Replicate()}) for name, style in chosen if style is not None}


def cut_in_turn(model: nn.Module, mesh: DeviceMesh) -> None:
    """Matrices whose gradients are given: in turn cut by rows, by columns, and not at all."""
    for layer, dim in zip(model.layers, cycle([0, 1, None]), strict=False):
        if dim is not None:
            weight = distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(dim)])
            layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)


def dedicate(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    kwargs.setdefault("predicate", is_proj)
    if "replicate" in mesh.mesh_dim_names:
        kwargs["replicate_mesh"] = mesh["replicate"]
        dmuon.dedicate_params(model, mesh["shard"], **kwargs)
    else:
        dmuon.dedicate_params(model, mesh["dp"], **kwargs)


def shard(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    dp = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=dp, **kwargs)
    fully_shard(model, mesh=dp, **kwargs)


def dedicate_on(
    model: nn.Module, sizes: Sizes, *, mesh: DeviceMesh | None = None, reshard: bool = True, **kwargs: Any
) -> DeviceMesh:
    """Tensor parallelism and the dedicated parameters; the base ones stay as they are."""
    mesh = mesh if mesh is not None else make_mesh(sizes)
    if "tp" in sizes:
        parallelize(model, mesh)
    if "ddp" not in sizes:
        dedicate(model, mesh, reshard_after_forward=reshard, **kwargs)
        return mesh
    kwargs.setdefault("predicate", is_proj)
    call = dmuon.dedicate_params_ddp_tp if "tp" in sizes else dmuon.dedicate_params_ddp
    call(model, mesh["dp"], **kwargs)
    return mesh


def distribute(
    model: nn.Module, sizes: Sizes, *, mesh: DeviceMesh | None = None, reshard: bool = True, **kwargs: Any
) -> DeviceMesh:
    """All that comes before the optimizer, by the calls of the documentation."""
    mesh = dedicate_on(model, sizes, mesh=mesh, reshard=reshard, **kwargs)
    if "ddp" not in sizes:
        shard(model, mesh, reshard_after_forward=reshard)
    else:
        call = dmuon.replicate_tp if "tp" in sizes else dmuon.replicate
        call(model, mesh["dp"])
    return mesh


def build(
    model: nn.Module,
    sizes: Sizes,
    *,
    mesh: DeviceMesh | None = None,
    reshard: bool = True,
    predicate: Any = is_proj,
    **muon: Any,
) -> dmuon.Muon:
    distribute(model, sizes, mesh=mesh, reshard=reshard, predicate=predicate)
    return dmuon.Muon(model, **muon)


def replicas_of(sizes: Sizes) -> int:
    """The number of data-parallel ranks."""
    return math.prod(sizes.values()) // sizes.get("tp", 1)


def data_rank(sizes: Sizes) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and how many there are."""
    tp = sizes.get("tp", 1)
    return dist.get_rank() // tp, dist.get_world_size() // tp


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()
