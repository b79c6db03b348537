"""`step()` where there are fewer matrices than ranks: matrices with an owner each, against teams.

    python benchmarks/teams.py
    python benchmarks/teams.py --mesh dp=1,tp=4 --matrices 2 --rows 2048

Both train in the same processes, and take turns. A step is timed on the slowest rank, from when all gradients
are there until every weight is new. Writes teams.md to the folder --out.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dmuon

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from control import Control, own_mesh
from machine import cores, describe
from parallel import mesh_text, parse_mesh
from rounds import Turn, play
from spread import by_round, spread
from train_gpt import positive_int

HERE = Path(__file__).resolve().parent
KINDS = {
    "owners": {},
    "teams": {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"},
}


class Layer(nn.Module):
    """Matrices side by side."""

    def __init__(self, matrices: int, rows: int, cols: int) -> None:
        super().__init__()
        for number in range(matrices):
            self.add_module(f"proj{number}", nn.Linear(cols, rows, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(matrix(x) for matrix in self.children())


class Model(nn.Module):
    """One layer."""

    def __init__(self, matrices: int, rows: int, cols: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(matrices, rows, cols)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def turn(args: argparse.Namespace, settings: dict, control: Control) -> tuple[Callable[[], list[float]], int]:
    """What times one step, and the number of matrices that have a team."""
    mesh = own_mesh(args.mesh)
    torch.manual_seed(0)
    model = Model(args.matrices, args.rows, args.cols)
    plan = {name: ColwiseParallel() for name, _ in model.layers[0].named_children()}
    parallelize_module(model.layers[0], mesh["tp"], plan)
    dmuon.dedicate_params(model, mesh["dp"], predicate=lambda name, param: param.ndim == 2)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model, **settings)
    x = torch.randn(4, args.cols)

    def run() -> list[float]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        control.barrier()
        begin = time.perf_counter()
        optimizer.step()
        optimizer.synchronize()
        return [time.perf_counter() - begin]

    for _ in range(2):
        run()
    return run, sum(param.has_team for param in dmuon.get_dedicated_params(model))


def work(rank: int, world_size: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group(
        "gloo",
        init_method=args.store.as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=2),
    )
    control = Control(timedelta(minutes=4))
    built = {kind: turn(args, settings, control) for kind, settings in KINDS.items()}
    turns = {kind: Turn(run) for kind, (run, _) in built.items()}
    play(list(turns.values()), args.rounds, control, lambda number: None)
    if rank == 0:
        for each in turns.values():
            if each.error:
                raise SystemExit(each.error)
        seconds = {kind: [reading[0] for reading in each.readings] for kind, each in turns.items()}
        write(args, seconds, built["teams"][1])
    control.barrier()
    dist.destroy_process_group()


def write(args: argparse.Namespace, seconds: dict[str, list[float]], teams: int) -> None:
    ratio = spread(by_round(seconds["teams"], seconds["owners"]), 2)
    lines = [
        "# Teams where there are fewer matrices than ranks",
        "",
        f"{describe()}. Mesh {mesh_text(args.mesh)}; {args.matrices} of {args.rows} x {args.cols}, "
        f"{teams} by teams; {args.rounds} rounds.",
        "",
        "Of `step()` until every weight is new, on the slowest rank: median and quartiles.",
        "",
        "| | seconds | of owners |",
        "|---|---|---|",
        f"| owners | {spread(seconds['owners'], 3)} | 1 |",
        f"| teams | {spread(seconds['teams'], 3)} | {ratio} |",
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "teams.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mesh", type=parse_mesh, default="dp=2,tp=2", metavar="SIZES", help="dp=N,tp=T")
    parser.add_argument("--matrices", type=positive_int, default=1)
    parser.add_argument("--rows", type=positive_int, default=2048)
    parser.add_argument("--cols", type=positive_int, default=2048)
    parser.add_argument("--rounds", type=positive_int, default=9, help="in each, both are timed once")
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="per process; by default cores / processes"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="teams.md goes here")
    args = parser.parse_args()
    if tuple(args.mesh) != ("dp", "tp"):
        parser.error("--mesh must be dp=N,tp=T")
    world_size = math.prod(args.mesh.values())
    args.threads = args.threads or max(1, cores() // world_size)
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        args.store = Path(folder) / "store"
        mp.spawn(work, (world_size, args), world_size)


if __name__ == "__main__":
    main()
