"""What runs at the same time, by recorded begin and end times of one rank."""

import importlib.util
import itertools
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

import dmuon.timeline
from dmuon.engine.runtime import find_runtime
from layouts import Model, Sizes, build, distribute, loss_of

EXAMPLES = Path(__file__).parent.parent / "examples"
PATIENCE = 10.0  # seconds


def computation_beside_slow_work() -> bool:
    """Whether a backward goes on while the gradients' queue is busy until a layer's backward is over."""
    model = Model()
    optimizer = build(model, {"dp": 2})
    loss_of(model, 0).backward()
    goes_on = threading.Event()
    model.layers[0].register_forward_hook(
        lambda _, args, out: out.register_hook(lambda _: goes_on.set()) and None
    )
    loss = loss_of(model, 0)
    ticket = find_runtime(model).communication.gradients.put("wait", "nobody", lambda: goes_on.wait(PATIENCE))
    loss.backward()
    optimizer.step()
    return ticket.wait()


def test_the_computation_goes_on_beside_the_queue_of_gradients(ranks):
    assert ranks(2, computation_beside_slow_work) == [True, True]


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
        optimizer.synchronize()

    traffic = find_runtime(model).traffic
    train()
    traffic.reset()
    with dmuon.timeline.record(model) as intervals:
        train()
    counted = dict(traffic.collectives)
    train()
    phases = [interval.phase for interval in intervals]
    return counted, {phase: phases.count(phase) for phase in phases}


@pytest.mark.always("sizes1")
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
    assert rows["publish_exchange"][3] == "0.0"  # in a step, or in front of a gather of the next forward
