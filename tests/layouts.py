"""Models cut by tensor parallelism, and the calls that distribute them, on every layout.

A layout is a dict of mesh dims: `dp` (or `replicate` and `shard`) for FSDP2 and HSDP, `ddp` for DDP; with
`tp` or without.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon

Sizes = dict[str, int]


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


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def make_mesh(sizes: Sizes) -> DeviceMesh:
    """The mesh; DDP's dim is called "dp" on it, as users do."""
    names = tuple("dp" if name == "ddp" else name for name in sizes)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict | None = None) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan or PLAN)


def dedicate(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    kwargs.setdefault("predicate", is_proj)
    if "replicate" in mesh.mesh_dim_names:
        kwargs["replicate_mesh"] = mesh["replicate"]
        dmuon.dedicate_params(model, mesh["shard"], **kwargs)
    else:
        dmuon.dedicate_params(model, mesh["dp"], **kwargs)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    dp = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)


def distribute(model: nn.Module, sizes: Sizes, *, reshard: bool = True, **kwargs: Any) -> DeviceMesh:
    """All that comes before the optimizer, by the calls of the documentation."""
    mesh = make_mesh(sizes)
    if "tp" in sizes:
        parallelize(model, mesh)
    if "ddp" not in sizes:
        dedicate(model, mesh, reshard_after_forward=reshard, **kwargs)
        shard(model, mesh)
        return mesh
    kwargs.setdefault("predicate", is_proj)
    if "tp" in sizes:
        dmuon.dedicate_params_ddp_tp(model, mesh["dp"], **kwargs)
        dmuon.replicate_tp(model, mesh["dp"])
    else:
        dmuon.dedicate_params_ddp(model, mesh["dp"], **kwargs)
        dmuon.replicate(model, mesh["dp"])
    return mesh


def build(model: nn.Module, sizes: Sizes, *, reshard: bool = True, **muon: Any) -> dmuon.Muon:
    distribute(model, sizes, reshard=reshard)
    return dmuon.Muon(model, **muon)


def data_rank(sizes: Sizes) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and how many there are."""
    tp = sizes.get("tp", 1)
    return dist.get_rank() // tp, dist.get_world_size() // tp


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()
