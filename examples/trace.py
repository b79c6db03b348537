"""Profile one training iteration: a trace for https://ui.perfetto.dev, and what runs under what.

    torchrun --nproc-per-node 4 examples/trace.py --mesh dp=2,tp=2

The trace is that of the first rank. dmuon's collectives have tracks of their own in it, one or more for each
phase, with an interval from when a collective is issued to when it is over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import dmuon.timeline
from gpt import GPTConfig
from parallel import (
    MESH_HELP,
    build_mesh,
    build_model_and_optimizer,
    data_parallel_place,
    mesh_text,
    misfit,
    parse_mesh,
)
from text_data import VOCAB_SIZE, TextData
from train_gpt import next_token_loss, positive_int, refuse, start_distributed

PARTS = ("forward", "backward", "step", "next forward")
PREFIX = "dmuon::"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Profile one training iteration of a small GPT with dmuon. Start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--mesh", type=parse_mesh, metavar="SIZES", help=MESH_HELP)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="compute dtype. auto: bfloat16 on cuda, float32 on cpu",
    )
    parser.add_argument("--width", type=positive_int, default=256)
    parser.add_argument("--layers", type=positive_int, default=6)
    parser.add_argument("--heads", type=positive_int, default=4)
    parser.add_argument(
        "--data", metavar="GLOB", help="text files; default: Python's standard library sources"
    )
    parser.add_argument("--seq-len", type=positive_int, default=128, help="bytes per sequence")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="sequences per step, all ranks")
    parser.add_argument(
        "--warmup", type=positive_int, default=3, metavar="STEPS", help="steps before the trace"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/trace.json"), help="where the trace goes")
    parser.set_defaults(optimizer="dmuon", lr=0.02, adamw_lr=3e-3, weight_decay=0.0, seed=0)
    return parser


@dataclass(frozen=True)
class Span:
    """Something that took time; begin and end are in the trace's microseconds."""

    name: str
    begin: float
    end: float

    @property
    def phase(self) -> str:
        """The phase, of a collective of dmuon's."""
        return self.name.removeprefix(PREFIX).split(" ")[0]

    def inside(self, other: Span) -> float:
        """How much of this span lies inside another one, in microseconds."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


def train_step(model: nn.Module, optimizer: Optimizer, batch: Any, device: torch.device) -> None:
    """One update, with its parts marked for the profiler."""
    with record_function("forward"):
        loss = next_token_loss(model, batch, device)
    with record_function("backward"):
        loss.backward()
    with record_function("step"):
        optimizer.step()
        optimizer.zero_grad()


def profile_iteration(
    model: nn.Module, optimizer: Optimizer, data: TextData, warmup: int, device: torch.device
) -> tuple[profile, list[Span]]:
    """Train; profile one iteration and the forward after it, in which its publishes end.

    Also returns the collectives with their true intervals, where the profile does not have them (on CPU).
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for step in range(warmup):
        train_step(model, optimizer, data.train_batch(step), device)
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        train_step(model, optimizer, data.train_batch(warmup), device)  # the profiler warms up as well
        dist.barrier()
        profiler.step()
        with recorded(model, device) as intervals:
            train_step(model, optimizer, data.train_batch(warmup + 1), device)
            with record_function("next forward"), torch.no_grad():
                next_token_loss(model, data.train_batch(warmup + 2), device)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return profiler, [
        Span(f"{PREFIX}{i.phase} {i.label}", i.begin / 1e3, i.end / 1e3)
        for i in sorted(intervals, key=lambda interval: interval.begin)
    ]


def recorded(
    model: nn.Module, device: torch.device
) -> contextlib.AbstractContextManager[list[dmuon.timeline.Interval]]:
    return contextlib.nullcontext([]) if device.type == "cuda" else dmuon.timeline.record(model)


def spans_of(events: list[dict[str, Any]]) -> Iterator[Span]:
    """The marked parts of the iteration, and on CUDA the collectives as the device ran them."""
    for event in events:
        on_device = event.get("cat") == "gpu_user_annotation"
        if event.get("ph") == "X" and (
            (event["name"] in PARTS and not on_device) or (event["name"].startswith(PREFIX) and on_device)
        ):
            yield Span(event["name"], event["ts"], event["ts"] + event["dur"])


def add_tracks(trace: dict[str, Any], spans: list[Span]) -> list[Span]:
    """Put collectives into a trace, on tracks of their own; returns them in the trace's time.

    Several tracks for a phase whose collectives overlap, because spans of one track must not.
    """
    epoch = trace.get("baseTimeNanoseconds", 0) / 1e3
    spans = [Span(span.name, span.begin - epoch, span.end - epoch) for span in spans]
    process = next(event["pid"] for event in trace["traceEvents"] if event.get("name") == "forward")
    tracks: list[list[Span]] = []
    for span in spans:
        free = (t for t in tracks if t[-1].phase == span.phase and t[-1].end <= span.begin)
        track = next(free, None)
        if track is None:
            tracks.append(track := [])
        track.append(span)
    for number, track in enumerate(sorted(tracks, key=lambda track: track[0].phase), start=1):
        place = {"pid": process, "tid": 10**9 + number}  # no thread of the system has such a number
        names = {
            "thread_name": {"name": f"dmuon {track[0].phase}"},
            "thread_sort_index": {"sort_index": number},
        }
        trace["traceEvents"] += [
            {"ph": "M", "name": key, "args": value, **place} for key, value in names.items()
        ]
        trace["traceEvents"] += [
            {"ph": "X", "cat": "dmuon", "name": s.name, "ts": s.begin, "dur": s.end - s.begin, **place}
            for s in track
        ]
    return spans


def overlap_table(spans: list[Span]) -> Table:
    """For each phase: the collectives, the sum of their times, and how much of it lies inside each part."""
    parts = {span.name: span for span in spans if span.name in PARTS}
    by_phase: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.name.startswith(PREFIX):
            by_phase.setdefault(span.phase, []).append(span)
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("count", "total", *(f"in {part}" for part in parts)):
        table.add_column(name, justify="right")
    for phase, members in by_phase.items():
        total = sum(span.end - span.begin for span in members)
        times = [sum(span.inside(part) for span in members) for part in parts.values()]
        table.add_row(phase, str(len(members)), *(f"{time / 1e3:.1f}" for time in (total, *times)))
    lengths = [part.end - part.begin for part in parts.values()]
    table.add_section()
    table.add_row("the part itself", "", "", *(f"{length / 1e3:.1f}" for length in lengths))
    return table


def run(args: argparse.Namespace, device: torch.device) -> None:
    sizes = args.mesh or {"dp": dist.get_world_size()}
    gpt = GPTConfig(VOCAB_SIZE, args.width, args.layers, args.heads, args.seq_len)
    refuse(misfit(sizes, dist.get_world_size(), args.batch_size, args.optimizer, gpt))
    mesh = build_mesh(sizes, device)
    model, optimizer = build_model_and_optimizer(args, gpt, mesh, device)
    place, places = data_parallel_place(mesh)
    data = TextData(
        args.data,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        rank=place,
        ranks=places,
        seed=args.seed,
    )
    profiler, collectives = profile_iteration(model, optimizer, data, args.warmup, device)
    if dist.get_rank() != 0:
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(args.out))
    trace = json.loads(args.out.read_text(encoding="utf-8"))
    spans = [*spans_of(trace["traceEvents"]), *add_tracks(trace, collectives)]
    args.out.write_text(json.dumps(trace), encoding="utf-8")
    console = Console()
    console.print(f"One iteration on {mesh_text(sizes)}, as rank 0 saw it:", highlight=False)
    console.print(overlap_table(spans))
    console.print(f"The trace, for https://ui.perfetto.dev: {args.out}", soft_wrap=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    device = start_distributed(args.device)
    try:
        run(args, device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
