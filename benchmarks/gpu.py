"""What only a GPU can show, in under five minutes on one device.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --small        (whether the script itself works)

1. Every backend of Newton-Schulz that the device has, in bfloat16 and float16: error against float64, time
   per shape against torch's kernel, against its arithmetic in the same dtype and against the device's
   own products (see `newton_schulz.py`), many small matrices in one batch against one after the other, and
   launched one by one against a CUDA graph.
2. `dmuon.Muon.step()` for one rank's share of a 7B model (Llama 2 7B's matrices over `--ranks` owners)
   against fused AdamW on the same share, and the memory that each needs at its peak.
3. A small training under FSDP2, HSDP and DDP, each on a mesh of this one device: how far its weights are from
   those of the same training on the CPU, with Newton-Schulz in float32 on both.

Needs torch and dmuon alone. Writes `results/gpu.md`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.optim.newton_schulz import newton_schulz
from newton_schulz import RESULTS, Contest, heading, in_rounds, shape_of, write
from spread import by_round, spread

SHAPES = ["1024x1024", "4096x4096", "1024x4096", "4096x11008"]
WIDTH, HIDDEN, LAYERS = 4096, 11008, 32  # Llama 2 7B, arXiv:2307.09288


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--ranks", type=int, default=32, help="owners of the 7B model (default 32)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="at least, for each measurement in a round"
    )
    parser.add_argument("--small", action="store_true", help="small shapes and a small model")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.md")
    return parser


class Share(nn.Module):
    """The matrices that one of `ranks` owners has of a 7B model, layer by layer."""

    def __init__(self, ranks: int, scale: int) -> None:
        super().__init__()
        width, hidden = WIDTH // scale, HIDDEN // scale
        layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
        mine = max(1, round(LAYERS * len(layer) / ranks))
        shapes = itertools.islice(itertools.cycle(layer), mine)
        self.layers = nn.ModuleList(nn.Linear(cols, rows, bias=False) for rows, cols in shapes)


def backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Those that can be had."""
    found = []
    for backend in ("full", "panels", "quack", "triton"):
        try:
            newton_schulz(torch.ones(128, 128, device=device), dtype=dtype, backend=backend)
        except RuntimeError as error:
            print(f"{backend} in {dtype}: {error}")
        else:
            found.append(backend)
    return found


def orthogonalization(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Part 1: a table per dtype, backend and form."""
    sides = [64] if args.small else [2048, 4096, 8192]
    shapes = [shape_of(text) for text in (["64x64", "64x256"] if args.small else SHAPES)]
    for dtype, algorithm in ((torch.bfloat16, "direct"), (torch.float16, "gram")):
        for backend in backends(device, dtype):
            contest = Contest(device, dtype, algorithm, backend, sides)
            yield from contest.table(shapes, args.rounds, args.seconds)
            yield ""


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Part 1, small matrices."""
    yield "One after the other / in one batch, bfloat16:"
    yield ""
    yield "| matrices | ratio of times |"
    yield "|---|---:|"
    for count, side in ((16, 64), (16, 256), (16, 512), (4, 1024), (4, 2048)):
        if args.small and side > 64:
            continue
        batch = torch.randn(count, side, side, device=device)
        contestants = (
            lambda batch=batch: [newton_schulz(matrix, dtype=torch.bfloat16) for matrix in batch],
            lambda batch=batch: newton_schulz(batch, dtype=torch.bfloat16),
        )
        ratios = in_rounds(contestants, args.rounds, args.seconds, device)
        yield f"| {count} of {side}x{side} | {spread(by_round(*ratios), 2)} |"
    yield ""


def graphs(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Part 1, what launches cost."""
    yield "Launched one by one / as a CUDA graph, bfloat16:"
    yield ""
    if device.type != "cuda":
        yield f"not on {device}"
        yield ""
        return
    yield "| shape | ratio of times |"
    yield "|---|---:|"
    for text in ("64x64", "256x256", "256x1024", *SHAPES):
        matrix = torch.randn(shape_of(text), device=device)
        orthogonalize = functools.partial(newton_schulz, matrix, dtype=torch.bfloat16)
        orthogonalize()  # loads kernels, which a graph cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            orthogonalize()
        ratios = in_rounds([orthogonalize, graph.replay], args.rounds, args.seconds, device)
        yield f"| {text} | {spread(by_round(*ratios), 2)} |"
    yield ""


def step(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Part 2."""
    scale = 64 if args.small else 1
    names = {"dmuon": dmuon_step, "AdamW, fused": adamw_step}
    ready = {}
    for name, prepare in names.items():
        torch.manual_seed(0)
        with torch.device(device):
            ready[name] = prepare(Share(args.ranks, scale), device)
    share = Share(args.ranks, scale).to("meta")
    ours, theirs = in_rounds(list(ready.values()), args.rounds, args.seconds, device)
    elements = sum(param.numel() for param in share.parameters())
    size = f"{len(share.layers)} matrices with {elements:,} elements in float32"
    yield f"`step()` on {size}, one of {args.ranks} ranks' share:"
    yield ""
    yield "| | ms | over AdamW | peak beside what rests, MB |"
    yield "|---|---:|---:|---:|"
    for (name, function), times in zip(ready.items(), (ours, theirs), strict=True):
        milliseconds = spread([1e3 * seconds for seconds in times], 2)
        ratio = spread(by_round(times, theirs), 2)
        yield f"| {name} | {milliseconds} | {ratio} | {peak(function, device)} |"


def dmuon_step(model: nn.Module, device: torch.device) -> Callable[[], object]:
    """`step()` of dmuon on a mesh of this one device, with gradients set once."""
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh["dp"], predicate=lambda name, param: True)
    optimizer = dmuon.Muon(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
        param.grad.to_local().normal_()
    return optimizer.step


def adamw_step(model: nn.Module, device: torch.device) -> Callable[[], object]:
    """`step()` of torch's fused AdamW."""
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(model.parameters(), fused=True).step


def training(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Part 3."""
    yield ""
    yield "Largest difference of any weight from the same training on the CPU, in float32:"
    yield ""
    yield "| layout | difference |"
    yield "|---|---:|"
    for layout in ("FSDP2", "HSDP", "DDP"):
        there, here = (trained(layout, torch.device(kind)) for kind in (device.type, "cpu"))
        difference = max((a - b).abs().max().item() for a, b in zip(there, here, strict=True))
        yield f"| {layout} | {difference:.1e} |"


def trained(layout: str, device: torch.device) -> list[torch.Tensor]:
    """The weights of a small model after a few steps of two micro-batches each, on the CPU."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(96, 8)).to(device)
    batches = torch.randn(3, 2, 32, 96)
    if layout == "DDP":
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
        dmuon.dedicate_params_ddp(model, mesh["dp"])
        dmuon.replicate(model, mesh["dp"])
    else:
        names = ("replicate", "shard") if layout == "HSDP" else ("shard",)
        mesh = init_device_mesh(device.type, (1,) * len(names), mesh_dim_names=names)
        replicas = mesh["replicate"] if layout == "HSDP" else None
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=replicas)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    for step in batches.to(device):
        for batch in step:
            model(batch).square().mean().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [dmuon.full_tensor(param).detach().cpu() for param in model.parameters()]


def peak(function: Callable[[], object], device: torch.device) -> str:
    """Megabytes that one call allocates on top of what there was, at its peak."""
    if device.type != "cuda":
        return "not measured"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.1f}"


def main() -> None:
    """Measure, print and write everything."""
    args = build_parser().parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        parts = (part(args, device) for part in (orthogonalization, batches, graphs, step, training))
        write(itertools.chain(heading("On one GPU", "gpu.py"), *parts), args.out)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
