"""The meshes that `train_gpt.py` runs on, and how a GPT and its optimizer are spread over each of them.

The dims of a mesh say what is done with the model:

- `dp`: FSDP2 cuts the base parameters into shards, one per rank; dmuon gives each matrix one owner;
- `replicate`: HSDP, whole copies of what `dp` cuts;
- `ddp`: DDP, in place of `dp`: each rank keeps all weights;
- `tp`: tensor parallelism cuts the projections, and with them the computation.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import dmuon
from gpt import GPT, GPTConfig

MESH_FORMS = (
    "dp=N",
    "replicate=M,dp=N",
    "dp=N,tp=T",
    "replicate=M,dp=N,tp=T",
    "ddp=N",
    "ddp=N,tp=T",
)
MESH_HELP = (
    "dp=4: FSDP2. replicate=2,dp=2: HSDP, 2 copies of what dp cuts. ddp=4: DDP, each rank keeps all weights. "
    "Tensor parallelism is added at the end of each: dp=2,tp=2, replicate=2,dp=1,tp=2, ddp=2,tp=2. The sizes "
    "multiply to the number of processes. Default: dp=all ranks"
)


def parse_mesh(text: str) -> dict[str, int]:
    """`dp=4`, `replicate=2,dp=2`, `dp=2,tp=2` and so on as a dictionary.

    Raises:
        argparse.ArgumentTypeError: for any other form, naming those there are.
    """
    forms = [tuple(dim.split("=")[0] for dim in form.split(",")) for form in MESH_FORMS]
    try:
        pairs = [part.split("=") for part in text.split(",")]
        names, sizes = [name.strip() for name, _ in pairs], [int(size) for _, size in pairs]
    except ValueError:
        names, sizes = [], []
    if tuple(names) not in forms or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {'  '.join(MESH_FORMS)}")
    return dict(zip(names, sizes, strict=True))


def mesh_text(sizes: dict[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def misfit(sizes: dict[str, int], world_size: int, batch_size: int, optimizer: str, gpt: GPTConfig) -> str:
    """Why a run cannot have this mesh; empty if it can."""
    mesh, tp = f"--mesh {mesh_text(sizes)}", sizes.get("tp", 1)
    processes = math.prod(sizes.values())
    if processes != world_size:
        return f"{mesh} needs {processes} processes, not {world_size}"
    if batch_size % (processes // tp):
        return f"{mesh} needs a --batch-size that is a multiple of {processes // tp}, not {batch_size}"
    if gpt.heads % tp or gpt.hidden % tp:
        return (
            f"{mesh} gives {tp} ranks an equal part of each layer, but there are {gpt.heads} heads (--heads) "
            f"and {gpt.hidden} feed-forward units (from --width {gpt.width}): both must be multiples of {tp}"
        )
    return lacks_baseline(sizes) if optimizer == "adamw" else ""


def lacks_baseline(sizes: dict[str, int]) -> str:
    """Why there is no AdamW without dmuon on this mesh; empty if there is."""
    if tuple(sizes) != ("ddp", "tp"):
        return ""
    return (
        f"{mesh_text(sizes)} cannot train with plain AdamW: DistributedDataParallel does not take the "
        "DTensors of tensor parallelism. Use dp in place of ddp"
    )


def build_mesh(sizes: dict[str, int], device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def data_parallel_place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's position among the data-parallel ranks, and their number. One TP group has one position."""
    position, count = 0, 1
    for name in names_of(mesh):
        if name != "tp":
            position = position * mesh[name].size() + mesh[name].get_local_rank()
            count *= mesh[name].size()
    return position, count


def is_projection(name: str, param: torch.Tensor) -> bool:
    """The matrices for Muon, or stacks of them: projections in the layers, not the embedding and the head."""
    return "proj" in name and param.ndim >= 2


def cut_projections(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism: each rank computes some heads and some feed-forward units, and the sums are shared.

    Embedding, norms and head stay whole on each rank of a TP group.
    """
    # Both parts of a layer take their input as a DTensor, so that its gradient is summed over the ranks once
    # and not once per projection.
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    plan = {
        "attention": whole,
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(),
        "mlp": whole,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


def shard(model: GPT, mesh: DeviceMesh, bfloat16: bool) -> nn.Module:
    """FSDP2, or HSDP where the mesh has a `replicate` dim; bfloat16: what the computation is done in."""
    data_parallel = mesh["replicate", "dp"] if "replicate" in names_of(mesh) else mesh["dp"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=data_parallel, mp_policy=policy)
    return fully_shard(model, mesh=data_parallel, mp_policy=policy)


def autocast(model: GPT, mesh: DeviceMesh) -> None:
    """Compute in bfloat16 where FSDP2 is not there to do it."""
    model.forward = torch.autocast(mesh.device_type, torch.bfloat16)(model.forward)  # type: ignore[method-assign]


def spread_for_adamw(model: GPT, mesh: DeviceMesh, bfloat16: bool) -> nn.Module:
    """The model on the mesh, as it is done without dmuon."""
    if "tp" in names_of(mesh):
        cut_projections(model, mesh["tp"])
    if "ddp" not in names_of(mesh):
        return shard(model, mesh, bfloat16)
    if bfloat16:
        autocast(model, mesh)
    return DistributedDataParallel(model)


def spread_for_dmuon(model: GPT, mesh: DeviceMesh, bfloat16: bool) -> nn.Module:
    """The model on the mesh. The dmuon lines are the whole difference to `spread_for_adamw`."""
    if "tp" in names_of(mesh):
        cut_projections(model, mesh["tp"])
    if "ddp" not in names_of(mesh):
        replicate = mesh["replicate"] if "replicate" in names_of(mesh) else None
        dmuon.dedicate_params(model, mesh["dp"], replicate_mesh=replicate, predicate=is_projection)
        return shard(model, mesh, bfloat16)
    if bfloat16:
        autocast(model, mesh)
    if "tp" in names_of(mesh):
        dmuon.dedicate_params_ddp_tp(model, mesh["ddp"], predicate=is_projection)
        dmuon.replicate_tp(model, mesh["ddp"])
    else:
        dmuon.dedicate_params_ddp(model, mesh["ddp"], predicate=is_projection)
        dmuon.replicate(model, mesh["ddp"])
    return model


def build_model_and_optimizer(
    args: argparse.Namespace, gpt: GPTConfig, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, Optimizer]:
    """The model, spread over the mesh, and its optimizer."""
    torch.manual_seed(args.seed)  # the same initial weights on every rank and for either optimizer
    with device:
        model = GPT(gpt)
    model.init_weights()

    bfloat16 = args.dtype == "bfloat16" or (args.dtype == "auto" and device.type == "cuda")
    if args.optimizer == "dmuon":
        spread = spread_for_dmuon(model, mesh, bfloat16)
        return spread, dmuon.Muon(spread, lr=args.lr, adamw_lr=args.adamw_lr, weight_decay=args.weight_decay)

    spread = spread_for_adamw(model, mesh, bfloat16)
    matrices = [param for name, param in spread.named_parameters() if is_projection(name, param)]
    others = [param for name, param in spread.named_parameters() if not is_projection(name, param)]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return spread, torch.optim.AdamW(groups, lr=args.adamw_lr, betas=(0.9, 0.95))
