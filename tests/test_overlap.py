"""What runs at the same time, by recorded begin and end times.

Times of one rank are compared with each other only. Where an order depends on how fast a collective is, the
model waits in its backward until those in flight are over, so that what is left is the engine's doing.
"""

import contextlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import dmuon.timeline
from dmuon.comm import Channel, Traffic
from dmuon.engine.runtime import find_runtime
from dmuon.timeline import Interval
from layouts import Layer, Model, Sizes, build, distribute, loss_of

EXAMPLES = Path(__file__).parent.parent / "examples"
WIDTH, HIDDEN, DEPTH = 48, 130, 6
PATIENCE = 30.0  # seconds; a collective that is not over by then never will be

Marks = dict[str, tuple[int, int]]  # begin and end, in ns


class Pause(torch.autograd.Function):
    """The identity, whose backward calls `action`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return gradient, None


class PausingModel(nn.Module):
    """Marks when its layers compute: "forward k", and "pause k" when the backward of layer k is over.

    In a pause, the reductions in flight come to the ends of their stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, HIDDEN) for _ in range(DEPTH))
        self.marks: Marks = {}
        for k, layer in enumerate(self.layers):
            layer.forward = self.marked(f"forward {k}", layer.forward)  # inside of hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(Pause.apply(x, self.marked(f"pause {k}", self.pause)))
        return x

    def pause(self) -> None:
        operations = find_runtime(self)._reductions._operations
        until(lambda: all(operation.is_ready() for operation in operations))

    def marked(self, name: str, function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with self.mark(name):
                return function(*args)

        return run

    @contextlib.contextmanager
    def mark(self, name: str) -> Iterator[None]:
        begin = time.time_ns()
        yield
        self.marks[name] = (begin, time.time_ns())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def iteration(sizes: Sizes) -> tuple[list[Interval], Marks]:
    """The second iteration; in the first one, connections are made and the order of the layers is learnt."""
    model = PausingModel()
    optimizer = build(model, sizes, lr=0.01)
    x = torch.randn(8, WIDTH).requires_grad_()

    def train() -> None:
        loss = model(x).square().mean()
        with model.mark("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    dist.barrier()
    with dmuon.timeline.record(model) as intervals:
        train()
        find_runtime(model).wait_published()  # so that all that is recorded is over
    return intervals, model.marks


def layer_of(interval: Interval) -> int:
    return int(interval.label.split("'")[1].removeprefix("layers."))  # group 'layers.3', owner slot 0


MESHES = [
    pytest.param({"dp": 2, "tp": 2}, "reduce", id="dp2-tp2"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, "reduce_replicas", id="hsdp2x1-tp2"),
    pytest.param({"dp": 4}, "reduce", id="dp4"),
]


@pytest.mark.parametrize(("sizes", "reduce"), MESHES)
def test_an_iteration_overlaps(ranks, sizes, reduce):
    answers = ranks(4, iteration, sizes)
    for rank, (intervals, marks) in enumerate(answers):
        reductions = [i for i in intervals if i.phase == reduce]
        exchanges = [i for i in intervals if i.phase == "exchange"]
        assert {layer_of(i) for i in reductions} == set(range(DEPTH))
        lies_under_the_computation([*reductions, *exchanges], marks)
        if "tp" in sizes:
            assert exchanges, f"rank {rank} takes part in none"
            follow(exchanges, reductions)
        if "shard" not in sizes:  # where one shard has nothing to gather
            gathers_are_ahead([i for i in intervals if i.phase == "gather"], marks)
    if "tp" in sizes:
        every = {layer_of(i) for intervals, _ in answers for i in intervals if i.phase == "exchange"}
        assert every == set(range(DEPTH))


def lies_under_the_computation(intervals: list[Interval], marks: Marks) -> None:
    """Not just before backward returns, which what is flushed at its end does too."""
    begin, end = marks["backward"]
    computed, _ = marks["pause 0"]  # all layers' backward is over
    for interval in intervals:
        assert begin < interval.begin < interval.end < end, interval
        # What layer k starts goes on when gradients of the layers below arrive: a stage in each, at least.
        assert interval.begin < computed or layer_of(interval) == 0, f"{interval} begins late"
        assert interval.end < computed or layer_of(interval) <= 1, f"{interval} ends late"


def follow(exchanges: list[Interval], reductions: list[Interval]) -> None:
    reduced = {interval.label: interval.end for interval in reductions}
    for exchange in exchanges:
        assert exchange.begin > reduced[exchange.label], f"{exchange} begins before its gradients are reduced"


def gathers_are_ahead(gathers: list[Interval], marks: Marks) -> None:
    """The weights of a layer are on their way while its neighbour computes, in forward and in backward."""
    begin_backward, end_backward = marks["backward"]
    in_forward = [i for i in gathers if i.begin < begin_backward]
    in_backward = [i for i in gathers if begin_backward < i.begin < end_backward]
    assert {layer_of(i) for i in in_forward} == {layer_of(i) for i in in_backward} == set(range(DEPTH))
    for gather in in_forward:
        if (layer := layer_of(gather)) > 0:
            assert gather.begin < marks[f"forward {layer - 1}"][1], f"{gather} begins late"
    for gather in in_backward:
        if (layer := layer_of(gather)) < DEPTH - 1:
            assert gather.begin < marks[f"pause {layer + 1}"][0], f"{gather} begins late"


# What is recorded


def late_peer(kind: str) -> tuple[Interval, Marks] | None:
    """Rank 1 joins a collective only when rank 0 says so, after it has issued it."""
    traffic = Traffic()
    channel = Channel("phase", (0, 1), dist.group.WORLD, traffic)
    x, y, token = torch.ones(8), torch.zeros(8), torch.zeros(1)
    signals = dist.new_group([0, 1])

    def issue() -> Any:
        if kind == "all_to_all":
            return channel.all_to_all(y, x, [4, 4], [4, 4], "it")
        if kind == "all_reduce":
            return channel.all_reduce(x, "it")
        return getattr(channel, kind)(x, 1 if kind == "broadcast" else 0, "it")

    if dist.get_rank() == 1:
        dist.recv(token, 0, group=signals)
        issue().wait()
        return None
    intervals: list[Interval] = []
    traffic.on_issue = dmuon.timeline.follow(intervals)
    pending = issue()
    before = time.time_ns()
    dist.send(token, 1, group=signals)
    until(pending.is_completed)
    after = time.time_ns()
    pending.wait()
    (interval,) = intervals
    return interval, {"other": (before, after)}


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "all_reduce", "all_to_all"])
def test_an_interval_lasts_from_issue_to_completion(ranks, kind):
    interval, marks = ranks(2, late_peer, kind)[0]
    before, after = marks["other"]
    assert interval.begin < before < interval.end < after
    assert (interval.phase, interval.label) == ("phase", "it")


def recorded_phases(sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    model = Model()
    distribute(model, sizes)
    with pytest.raises(RuntimeError, match=r"build dmuon\.Muon"), dmuon.timeline.record(model):
        pass
    optimizer = dmuon.Muon(model)

    def train() -> None:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        find_runtime(model).wait_published()

    traffic = find_runtime(model).traffic
    train()
    traffic.reset()
    with dmuon.timeline.record(model) as intervals:
        train()
    counted = dict(traffic.collectives)
    train()
    phases = [interval.phase for interval in intervals]
    return counted, {phase: phases.count(phase) for phase in phases}


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"replicate": 2, "shard": 2}, {"ddp": 2, "tp": 2}])
def test_every_collective_inside_the_block_is_recorded(ranks, sizes):
    for counted, recorded in ranks(4, recorded_phases, sizes):
        assert counted == recorded
        assert len(recorded) >= 2


# The example that draws it


def trace_here(*options: str) -> None:
    """Run `trace.py` in the process group that is there."""
    spec = importlib.util.spec_from_file_location("trace_example", EXAMPLES / "trace.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.append(str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
        module.run(module.build_parser().parse_args(options), torch.device("cpu"))
    finally:
        sys.path.remove(str(EXAMPLES))
        del sys.modules[spec.name]


def test_the_example_writes_a_trace(ranks, tmp_path, capsys):
    out = tmp_path / "folder" / "trace.json"
    sizes = ["--width=64", "--layers=3", "--seq-len=32", "--batch-size=8", "--warmup=1"]
    ranks(4, trace_here, "--mesh=dp=2,tp=2", *sizes, f"--data={EXAMPLES / '*.py'}", f"--out={out}")
    assert list(out.parent.iterdir()) == [out]  # one rank's
    events = [e for e in json.loads(out.read_text())["traceEvents"] if e.get("ph") == "X"]
    times = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    (begin, end), (_, step), (last, _) = times["backward"], times["step"], times["next forward"]
    assert begin < end < step < last

    ours = [e for e in events if e.get("cat") == "dmuon"]
    by_phase: dict[str, list[dict]] = {}
    for event in ours:
        by_phase.setdefault(event["name"].split(" ")[0], []).append(event)
    assert set(by_phase) == {f"dmuon::{p}" for p in ("gather", "reduce", "exchange", "publish_exchange")}
    for phase in ("dmuon::reduce", "dmuon::exchange"):
        for event in by_phase[phase]:
            assert begin < event["ts"] < event["ts"] + event["dur"] < end, event
    assert all(event["ts"] > end for event in by_phase["dmuon::publish_exchange"])
    for event in ours:  # near where the profiler, which has a clock of its own, saw it being issued
        issued = [e["ts"] for e in events if e["name"] == event["name"] and e.get("cat") != "dmuon"]
        assert min(abs(event["ts"] - moment) for moment in issued) < 1e6
    for track in {event["tid"] for event in ours}:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in ours if e["tid"] == track)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))

    rows = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        rows[cells[0]] = cells[1:]
    count, total, forward, backward, *others = rows["exchange"]
    assert int(count) == len(by_phase["dmuon::exchange"])
    assert total == backward
    assert {float(time) for time in (forward, *others)} == {0}
    assert rows["publish_exchange"][2:4] == ["0.0", "0.0"]
