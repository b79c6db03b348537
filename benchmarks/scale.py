"""What dmuon costs beside the arithmetic: set-up and bookkeeping by the number of matrices, and a large mesh.

No other rank exists here: torch's fake process group lets one process believe that it is rank 0 of many, and
its collectives return at once. What is left is the Python and dispatch work of one rank.

1. Models with more and more layers of four 8x8 matrices, on 8 x 64 ranks (HSDP): CPU seconds of set-up, of
   each part of a training step, and of state dicts. All should double when the matrices do.
2. Llama 3 8B on the meta device, set up for rank 0 of 4,096 on three meshes: CPU seconds and peak memory.

Every measurement has a process of its own. Writes scale.md and scale.png to the folder --out.

    python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.planner.registry import CONFIGS
from machine import describe

MATRICES = [500, 1000, 2000, 4000, 8000]
SERIES_MESH = "replicate=8,shard=64"
LARGE_MESHES = ["shard=4096", "replicate=16,shard=256", "replicate=8,shard=64,tp=8"]
WIDTH = 8  # of the matrices of the series: their arithmetic is nothing
STEPS = 5
SETUP = ("dedicate_params", "fully_shard", "Muon")
STEP = ("forward", "backward", "clip_grad_norm_", "step", "zero_grad")
STATE = ("state_dict",)

Seconds = dict[str, float]


# The models


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for matrix in self.matrices:
            y = matrix(y)
        return x + y


class TinyModel(nn.Module):
    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TinyLayer() for _ in range(matrices // 4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LlamaLayer(nn.Module):
    """The parameters of a layer; it is never run."""

    PLAN: Mapping[str, type] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
        **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
    }

    def __init__(self, width: int, hidden: int, shared: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Llama(nn.Module):
    def __init__(self, config: Mapping[str, Any], layers: int) -> None:
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        shared = width * config["num_key_value_heads"] // config["num_attention_heads"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            LlamaLayer(width, config["intermediate_size"], shared) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


# The measurements, each in a process of its own


def fake_mesh(text: str) -> DeviceMesh:
    """The mesh of rank 0, on the CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    dist.init_process_group("fake", rank=0, world_size=math.prod(sizes.values()), store=FakeStore())
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@contextmanager
def timed(seconds: Seconds, name: str, clock: Callable[[], float]) -> Iterator[None]:
    begin = clock()
    yield
    seconds[name] = clock() - begin


def set_up(model: nn.Module, mesh: DeviceMesh, seconds: Seconds, clock: Callable[[], float]) -> dmuon.Muon:
    """The calls of the documentation; for HSDP, where the mesh has a dim to replicate over."""
    hsdp = "replicate" in (mesh.mesh_dim_names or ())
    data_parallel = mesh["replicate", "shard"] if hsdp else mesh["shard"]
    with timed(seconds, "dedicate_params", clock):
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"] if hsdp else None)
    with timed(seconds, "fully_shard", clock):
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=data_parallel)
        fully_shard(model, mesh=data_parallel)
    with timed(seconds, "Muon", clock):
        return dmuon.Muon(model)


def measure_series(matrices: int) -> dict[str, Any]:
    """CPU seconds of set-up, of the parts of a step (medians) and of state dicts."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # DTensor does so when the first one is made, in half a second
    clock = time.process_time  # not of the wall: what else runs on the machine does not count
    seconds: Seconds = {}
    model = TinyModel(matrices)
    optimizer = set_up(model, fake_mesh(SERIES_MESH), seconds, clock)
    x = torch.ones(2, WIDTH)
    steps: list[Seconds] = []
    for _ in range(1 + STEPS):
        parts: Seconds = {}
        with timed(parts, "forward", clock):
            loss = model(x).sum()
        with timed(parts, "backward", clock):
            loss.backward()
        with timed(parts, "clip_grad_norm_", clock):
            dmuon.clip_grad_norm_(model, 1.0)
        with timed(parts, "step", clock):
            optimizer.step()
        with timed(parts, "zero_grad", clock):
            optimizer.zero_grad()
        steps.append(parts)
    for name in STEP:
        seconds[name] = statistics.median(parts[name] for parts in steps[1:])  # the first one sets up caches
    with timed(seconds, "state_dict", clock):
        model.state_dict()
        optimizer.state_dict()
    return {"matrices": len(dmuon.get_dedicated_params(model)), "seconds": seconds}


def measure_large(mesh_text: str, layers: int | None) -> dict[str, Any]:
    """CPU seconds, and the peak of the process's resident memory in MiB."""
    torch.set_num_threads(1)
    config = CONFIGS["llama-3-8b"]
    seconds: Seconds = {}
    clock = time.process_time
    with timed(seconds, "mesh", clock):
        mesh = fake_mesh(mesh_text)
    with timed(seconds, "model on meta", clock), torch.device("meta"):
        model = Llama(config, layers or config["num_hidden_layers"])
    numel = sum(param.numel() for param in model.parameters())
    if "tp" in (mesh.mesh_dim_names or ()):
        with timed(seconds, "parallelize_module", clock):
            for layer in model.layers:
                plan = {name: style() for name, style in LlamaLayer.PLAN.items()}
                parallelize_module(layer, mesh["tp"], plan)
    set_up(model, mesh, seconds, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return {
        "mesh": mesh_text,
        "ranks": mesh.size(),
        "matrices": len(dmuon.get_dedicated_params(model)),
        "numel": numel,
        "seconds": seconds,
        "peak_mib": peak / (2**20 if sys.platform == "darwin" else 2**10),
        "all_on_meta": all(param.is_meta for param in model.parameters()),
    }


def in_a_process(*arguments: str) -> dict[str, Any]:
    """The measurement that `arguments` ask for."""
    command = [sys.executable, str(Path(__file__)), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def best_of(repeats: int, matrices: int) -> dict[str, Any]:
    """The least of several processes, part by part: what disturbs a measurement adds to it."""
    runs = [in_a_process("--series", str(matrices)) for _ in range(repeats)]
    names = runs[0]["seconds"]
    return {**runs[0], "seconds": {name: min(run["seconds"][name] for run in runs) for name in names}}


# What is written


def markdown(series: list[dict[str, Any]], large: list[dict[str, Any]], command: str) -> str:
    parts = (*SETUP, *STEP, *STATE)
    lines = [
        "# Scale",
        "",
        f"Measured on: {describe()}. One process, rank 0 of torch's fake process group; no data moves.",
        "",
        f"    {command}",
        "",
        "## By the number of matrices",
        "",
        f"CPU milliseconds on one thread, {SERIES_MESH}, {WIDTH}x{WIDTH} matrices, four to a layer that "
        "`fully_shard` wraps. The parts of a step are all that happens in them: torch's modules, autograd "
        "and FSDP2, AdamW for the rest, and dmuon. `fully_shard` is torch's own. The last column is the sum "
        "of set-up without `fully_shard`, and of one step, per matrix.",
        "",
        f"| matrices | {' | '.join(f'`{name}`' for name in parts)} | µs per matrix, set-up / step |",
        "|---:" * (len(parts) + 2) + "|",
    ]
    for row in series:
        seconds, count = row["seconds"], row["matrices"]
        set_up_each = 1e6 * (seconds["dedicate_params"] + seconds["Muon"]) / count
        step_each = 1e6 * sum(seconds[name] for name in STEP) / count
        cells = " | ".join(f"{1e3 * seconds[name]:,.0f}" for name in parts)
        lines.append(f"| {count:,} | {cells} | {set_up_each:.0f} / {step_each:.0f} |")
    lines += [
        "",
        "![Set-up and one step by the number of matrices](scale.png)",
        "",
        "## A large mesh",
        "",
        "CPU seconds of rank 0 on one thread; the peak is that of the whole process, torch included.",
        "",
        "| mesh | ranks | parameters | matrices | "
        "model on meta | `dedicate_params` | `fully_shard` | `Muon` | in all | peak, MiB |",
        "|---|" + "---:|" * 9,
    ]
    for row in large:
        seconds = row["seconds"]
        cells = " | ".join(f"{seconds[name]:.2f}" for name in ("model on meta", *SETUP))
        what = f"{row['mesh']} | {row['ranks']:,} | {row['numel'] / 1e9:.2f} B | {row['matrices']}"
        lines.append(f"| {what} | {cells} | {sum(seconds.values()):.2f} | {row['peak_mib']:,.0f} |")
    return "\n".join(lines) + "\n"


def draw(series: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = [row["matrices"] for row in series]
    curves = {
        "set-up (dedicate_params, Muon)": ("dedicate_params", "Muon"),
        "forward and backward": ("forward", "backward"),
        "clip, step, zero_grad": ("clip_grad_norm_", "step", "zero_grad"),
        "state dicts": STATE,
    }
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    for label, names in curves.items():
        axes.loglog(counts, [sum(r["seconds"][n] for n in names) for r in series], marker="o", label=label)
    first = min(sum(series[0]["seconds"][name] for name in names) for names in curves.values())
    guide = [first / 2 * count / counts[0] for count in counts]
    axes.loglog(counts, guide, linestyle="--", color="gray", label="slope 1: twice as many, twice as long")
    axes.set(xlabel="matrices", ylabel="CPU seconds", title="Cost beside the arithmetic, one rank of 512")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--matrices", type=int, nargs="+", default=MATRICES, help="numbers of matrices")
    parser.add_argument("--meshes", nargs="+", default=LARGE_MESHES, help="large meshes for the 8B model")
    parser.add_argument(
        "--repeats", type=int, default=3, help="processes per number of matrices; the best counts"
    )
    parser.add_argument("--layers", type=int, help="layers of the 8B model, if not all 32")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument(
        "--series", type=int, metavar="MATRICES", help="print one measurement as JSON, no more"
    )
    parser.add_argument("--large", metavar="MESH", help="the same, of the 8B model")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.series is not None:
        print(json.dumps(measure_series(options.series)))
        return
    if options.large is not None:
        print(json.dumps(measure_large(options.large, options.layers)))
        return
    series = []
    for matrices in options.matrices:
        series.append(best_of(options.repeats, matrices))
        print(f"{matrices} matrices: {sum(series[-1]['seconds'].values()):.2f} s", file=sys.stderr)
    more = ["--layers", str(options.layers)] if options.layers else []
    large = [in_a_process("--large", mesh, *more) for mesh in options.meshes]
    given = sys.argv[1:] if arguments is None else arguments
    text = markdown(series, large, " ".join(["python benchmarks/scale.py", *given]))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.md").write_text(text, encoding="utf-8")
    draw(series, options.out / "scale.png")
    print(text)


if __name__ == "__main__":
    main()
