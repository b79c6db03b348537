"""The benchmark: its counts are right, a broken peer harms nobody, and a tiny run writes what it should."""

import importlib
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from dmuon.engine.runtime import find_runtime
from ranks import Ranks

ROOT = Path(__file__).parent.parent
FOLDERS = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
STEP = ROOT / "benchmarks" / "step.py"
TIMEOUT = 240  # seconds for one run of the script, on a machine that is busy with other things
SIZES = {"width": 32, "layers": 1, "heads": 2, "tokens": 16, "seq-len": 16, "vocab": 32}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]

BROKEN = """
NAME = "a broken one"
def build(model, mesh):
    raise RuntimeError("no kernel for this\\nand more that nobody wants to read")
"""


def part(name: str) -> ModuleType:
    """A module of the benchmark, in this process."""
    sys.path += [folder for folder in FOLDERS if folder not in sys.path]
    return importlib.import_module(name)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return importlib.import_module


# Counts


def count(file: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What the benchmark counts in one iteration of a peer, and what is known of it otherwise."""
    counting, contestant, model, peer = map(part, ("counting", "contestant", "model", "peer"))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    task = model.Task(part("gpt").GPTConfig(32, 32, 2, 2, 16), 32, 0)
    (found,) = peer.find_peers([], [file])
    ring = contestant.Contestant(found, task, mesh)
    for batch in ring.batches(3):
        ring.iterate(batch)
    ring.finish()
    runtime = find_runtime(ring.model) if file == "dmuon_muon" else None
    if runtime is not None:
        runtime.traffic.reset()
    with counting.Collectives(ring.model) as spy:
        ring.iterate(*ring.batches(1))
        ring.finish()
    traffic = None if runtime is None else (dict(runtime.traffic.collectives), dict(runtime.traffic.bytes))
    in_step = []
    for mode in (counting.Collectives(), CommDebugMode()):  # torch's own does not take FSDP2's forward
        ring.gradients(*ring.batches(1))
        with mode:
            ring.optimizer.step()
        in_step.append(mode)
    return {
        "in step": (sum(in_step[0].calls.values()), in_step[1].get_total_counts()),
        "collectives": dict(spy.calls),
        "bytes": dict(spy.bytes),
        "unknown": spy.unknown,
        "traffic": traffic,
        "layers": sum(p.numel() for layer in ring.model.layers for p in layer.parameters()),
        "root": sum(p.numel() for p in ring.model.parameters()),
    }


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"replicate": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_the_counts_are_dmuons_own(ranks: Ranks, sizes: dict[str, int]) -> None:
    for rank in ranks(torch.Size(sizes.values()).numel(), count, "dmuon_muon", sizes):
        collectives, nbytes = rank["traffic"]
        assert not rank["unknown"]
        counted, moved = rank["collectives"], rank["bytes"]
        own = [{n: v for n, v in seen.items() if n.startswith("dmuon.")} for seen in (counted, moved)]
        assert sum(own[0].values()) == sum(collectives.values()) > 0
        assert sum(own[1].values()) == sum(nbytes.values()) > 0


def test_the_counts_are_fsdp2s_too(ranks: Ranks) -> None:
    """Each layer is gathered twice and the root's rest once; everything is reduced once."""
    for rank in ranks(2, count, "fsdp2_adamw", {"dp": 2}):
        layers, rest = rank["layers"], rank["root"] - rank["layers"]
        assert rank["collectives"] == {"c10d._allgather_base_": 5, "c10d._reduce_scatter_base_": 3}
        assert rank["bytes"] == {
            "c10d._allgather_base_": 4 * (2 * layers + rest) // 2,
            "c10d._reduce_scatter_base_": 4 * (layers + rest) // 2,
        }


def test_collectives_that_dtensor_issues_are_counted(ranks: Ranks) -> None:
    for rank in ranks(4, count, "fsdp2_torch_muon", {"dp": 2, "tp": 2}):
        mine, torchs = rank["in step"]
        assert mine == torchs > 0
        assert not rank["unknown"]
        assert all(rank["bytes"][name] > 0 for name in rank["collectives"])


def issue_all_kinds() -> list[tuple[int, dict[str, int]]]:
    """Collectives of 12 float32 elements or so, each kind by itself."""
    collectives = part("counting").Collectives
    ones, wide = torch.ones(12), torch.ones(36)
    calls = [
        lambda: dist.broadcast(ones, 1),
        lambda: dist.reduce(ones, 1),
        lambda: dist.all_reduce(ones),
        lambda: dist.all_gather_into_tensor(torch.empty(36), ones),
        lambda: dist.reduce_scatter_tensor(torch.empty(12), wide),
        lambda: dist.all_to_all_single(torch.empty(36), wide),
        lambda: dist.gather(ones, [torch.empty(12)] * 3 if dist.get_rank() == 1 else None, 1),
        lambda: dist.scatter(torch.empty(12), [ones] * 3 if dist.get_rank() == 1 else None, 1),
        dist.barrier,
    ]
    counts = []
    for call in calls:
        with collectives() as spy:
            call()
        counts.append((sum(spy.calls.values()), dict(spy.bytes)))
    return counts


def test_every_kind_of_collective_is_counted_with_its_bytes(ranks: Ranks) -> None:
    for rank, counts in enumerate(ranks(3, issue_all_kinds)):
        at_root = 0 if rank == 1 else 48
        expected = [at_root, at_root, 64, 96, 96, 96, at_root, at_root]
        assert [sum(nbytes.values()) for _, nbytes in counts] == [*expected, 0]
        assert [calls for calls, _ in counts] == [1] * len(expected) + [0]


def test_memory_of_a_known_case(bench: Any) -> None:
    def million(count: int) -> torch.Tensor:
        return torch.zeros(count * 250_000)

    with bench("memory").Ledger() as ledger:
        kept, resized = million(4), million(1)
        million(50)  # gone before the window opens
        resized.untyped_storage().resize_(0)
        with ledger.window():
            boxed = [million(2)]
            other = threading.Thread(target=boxed.clear)  # as gloo's threads do
            other.start()
            other.join()
            temporary = million(3)
            temporary = temporary + kept[:1]  # two of 3 MB for a moment, and 4 that stay
            resized.untyped_storage().resize_(1_000_000)
            resized.zero_()
    assert ledger.rest == 4_000_000
    assert ledger.peak == 10_000_000


# Rounds


def test_every_turn_has_every_place_and_a_failing_one_is_left_out(bench: Any) -> None:
    rounds = bench("rounds")
    orders = [list(rounds.in_order("abc", number)) for number in range(6)]
    assert {order[0] for order in orders} == set("abc")
    assert all(sorted(order) == list("abc") for order in orders)
    assert {tuple(order) for order in orders} >= {("a", "b", "c"), ("a", "c", "b")}  # before and after each

    class Alone:
        """The control of a single rank."""

        def attempt(self, action: Any) -> tuple[Any, str]:
            try:
                return action(), ""
            except RuntimeError as error:
                return None, str(error)

        def slowest(self, readings: list[list[float]]) -> list[list[float]]:
            return readings

    runs: list[str] = []

    def fail() -> list[float]:
        runs.append("failing")
        raise RuntimeError("once is enough")

    good, bad = rounds.Turn(lambda: [1.0]), rounds.Turn(fail)
    rounds.play([bad, good], 3, Alone(), lambda number: None)
    assert (good.readings, good.error) == ([[1.0]] * 3, "")
    assert (bad.readings, bad.error, len(runs)) == ([], "once is enough", 1)


def fail_alone() -> tuple[str, float, str]:
    """One rank fails, for which the other waits in vain; then both try something else."""
    control_part = part("control")
    control = control_part.Control(timedelta(seconds=60))

    def build() -> None:
        group = dist.new_group(timeout=timedelta(seconds=2))
        if dist.get_rank() == 1:
            raise ValueError("only here\nand nowhere else")
        dist.barrier(group=group)

    def total() -> float:
        mesh = control_part.own_mesh({"dp": 2})
        assert mesh.get_group() is not dist.group.WORLD
        value = torch.ones(1)
        dist.all_reduce(value, group=mesh.get_group())
        return value.item()

    _, error = control.attempt(build)
    value, then = control.attempt(total)
    return error, value, then


def test_one_rank_that_fails_is_named_and_harms_nobody(ranks: Ranks) -> None:
    assert ranks(2, fail_alone) == [("ValueError: only here (on rank 1)", 2.0, "")] * 2


@pytest.mark.parametrize(("speed", "left_out"), [(1e12, False), (1e6, True)])
def test_without_instructions_for_its_dtype_a_peer_stays_out(
    bench: Any, monkeypatch: pytest.MonkeyPatch, speed: float, left_out: bool
) -> None:
    pace, peers, model = bench("pace"), bench("peer").find_peers([]), bench("model")
    monkeypatch.setattr(pace, "rate", lambda dtype, device: speed)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    task = model.Task(bench("gpt").GPTConfig(32, 32, 2, 2, 16), 32, 0)
    reasons = {peer.file: pace.too_slow(peer, task) for peer in peers}
    assert not any(reasons[peer.file] for peer in peers if peer.dtype is None)
    in_bfloat16 = {peer.file for peer in peers if peer.dtype == torch.bfloat16}
    assert in_bfloat16 == {"dmuon_bfloat16", "fsdp2_torch_muon", "muon_fsdp2"}
    for file in in_bfloat16:
        assert (f"--only {file} runs it" in reasons[file]) == left_out


def test_rates_are_measured(bench: Any) -> None:
    assert bench("pace").rate(torch.float32, torch.device("cpu")) > 1e6


# The command


def run_step(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(STEP), *TINY, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_a_tiny_run_writes_its_tables_and_names_what_is_broken(tmp_path: Path) -> None:
    peers, out = tmp_path / "peers", tmp_path / "out"
    peers.mkdir()
    (peers / "broken.py").write_text(BROKEN)
    (peers / "missing.py").write_text("import there_is_no_such_package\n")
    # The package compiles, which would take longer than all the rest.
    (tmp_path / "muon_fsdp2.py").write_text("raise ImportError('not in this test')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ("--mesh", "dp=2", "--rounds", "2", "--iterations", "1", "--steps", "1", "--warmup", "1")
    run = run_step(*arguments, "--peers", str(peers), "--out", str(out), PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    assert (out / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "a broken one" in run.stdout

    page = (out / "step.md").read_text()
    assert "not here: RuntimeError: no kernel for this |" in page
    assert "nobody wants to read" not in page
    assert "No module named 'there_is_no_such_package'" in page

    mesh, mixture = json.loads((out / "step.json").read_text())["meshes"]
    rows = {row["file"]: row for row in mesh["peers"]}
    built_in = {path.stem for path in (ROOT / "benchmarks" / "peers").glob("*.py")}
    assert set(rows) == {*built_in, "broken", "missing"}
    timed = {file: row for file, row in rows.items() if not row["error"]}
    assert set(timed) == built_in - {"muon_fsdp2"}
    for row in timed.values():
        assert len(row["iteration"]) == len(row["step"]) == len(row["settled"]) == 2
        assert all(0 < step <= settled for step, settled in zip(row["step"], row["settled"], strict=True))
        assert 0 < max(row["rest"]) < max(row["peak"])
        assert row["name"] in page
    assert len(rows["dmuon_muon"]["newton_schulz"]) == 2

    losses = {file: row["loss"] for file, row in timed.items()}
    assert len({loss["first"] for loss in losses.values()}) == 1  # the same weights and batches
    muon = losses["dmuon_muon"]["last"]
    assert losses["fsdp2_torch_muon"]["last"] == pytest.approx(muon, rel=1e-3)
    assert losses["fsdp2_adamw"]["last"] != pytest.approx(muon, rel=1e-3)
    assert muon < losses["dmuon_muon"]["first"]
    assert "Attention" not in page

    assert mixture["mesh"] == "dp=2, 8 experts"
    rows = {row["file"]: row for row in mixture["peers"]}
    assert "2D" in rows["fsdp2_torch_muon"]["error"]
    assert {file for file, row in rows.items() if not row["error"]} == set(timed) - {"fsdp2_torch_muon"}
    losses = {file: row["loss"]["last"] for file, row in rows.items() if not row["error"]}
    assert losses["dmuon_bfloat16"] == pytest.approx(losses["dmuon_muon"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--mesh", "dp=2", "--mesh", "dp=4"), "different numbers of processes"),
        (("--mesh", "ddp=2"), "use dp"),
        (("--mesh", "dp=1,tp=4"), "--heads"),
        (("--seq-len", "7"), "--seq-len 7"),
        (("--experts", "3"), "--experts 3 does not divide"),
        (("--only", "dmuon"), "no peer 'dmuon'"),
        (("--only", "dmuon_muon"), "--baseline fsdp2_adamw"),
        (("--peers", "/nowhere"), "no such folder"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_at_once(
    bench: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(SystemExit) as exit:
        bench("step").main([*TINY, *arguments])
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err


# Other benchmarks


@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("newton_schulz.py", ["--shapes", "16x16", "8x32"], ["| 16x16 |", "| 8x32 |"]),
        (
            "gpu.py",
            ["--device", "cpu", "--small"],
            ["| 64x256 |", "| 16 of 64x64 |", "| dmuon |", "| AdamW, fused |", "| HSDP | 0.0e+00 |"],
        ),
    ],
)
def test_scripts_on_one_device_run(script: str, options: list[str], rows: list[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.md"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    command += ["--rounds", "1", "--seconds", "0.001", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    written = out.read_text(encoding="utf-8")
    assert all(row in written for row in rows)
    errors = [
        float(line.split("|")[-2]) for line in written.splitlines() if line.startswith(("| 16x", "| 8x"))
    ]
    assert all(error < 1e-4 for error in errors)


def test_the_picture_is_that_of_the_results(tmp_path: Path) -> None:
    """`python benchmarks/evidence.py --draw` is to be run when the results are new."""
    picture = tmp_path / "evidence.svg"
    command = [sys.executable, str(ROOT / "benchmarks" / "evidence.py"), "--draw", "--picture", str(picture)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
    drawn = picture.read_text(encoding="utf-8")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn == (ROOT / "docs" / "images" / "evidence.svg").read_text(encoding="utf-8")
