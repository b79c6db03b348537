"""The examples: their parts, and tiny runs of the scripts themselves."""

import argparse
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ranks import Ranks, RanksFailed

pytestmark = pytest.mark.always("dmuon-dp=2,tp=2")

EXAMPLES = Path(__file__).parent.parent / "examples"
CPU = torch.device("cpu")
PROCESSES = 2
TIMEOUT = 240  # seconds for one run of a script, on a machine that is busy with other things
TEXT = str(EXAMPLES / "*.py")  # quicker to read than the standard library
SIZES = {"width": 32, "layers": 2, "heads": 2, "seq-len": 32, "batch-size": 4, "val-batches": 2}
MESHES = ("dp=4", "replicate=2,dp=2", "dp=2,tp=2", "replicate=2,dp=1,tp=2", "ddp=4", "ddp=2,tp=2")
TINY = [f"--{name}={size}" for name, size in SIZES.items()] + ["--device=cpu", f"--data={TEXT}"]

Import = Callable[[str], ModuleType]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Import:
    """Imports a module of the examples by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: __import__(name)


# The model


def tiny_gpt(example: Import, device: str = "cpu") -> Any:
    gpt = example("gpt")
    torch.manual_seed(0)
    with torch.device(device):
        return gpt.GPT(gpt.GPTConfig(vocab_size=50, width=32, layers=2, heads=4, seq_len=16))


def test_gpt_starts_on_the_meta_device_and_knows_nothing_at_first(example: Import) -> None:
    model = tiny_gpt(example, "meta").to_empty(device="cpu")
    model.init_weights()
    tokens = torch.randint(50, (4, 16))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert abs(loss.item() - math.log(50)) < 0.1
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


def test_projections_are_the_layers_matrices_and_nothing_else(example: Import) -> None:
    model, is_projection = tiny_gpt(example), example("parallel").is_projection
    chosen = {name for name, param in model.named_parameters() if is_projection(name, param)}
    assert chosen == {
        name for name, param in model.named_parameters() if "layers." in name and param.ndim == 2
    }
    assert len(chosen) == 2 * 7


@torch.no_grad()
def test_gpt_does_not_see_the_future_but_sees_the_past(example: Import) -> None:
    model = tiny_gpt(example)
    model.init_weights()
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % 50
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert (difference[:8] == 0).all()
    assert (difference[8:] > 0).all()


def test_rotary_scores_depend_on_the_distance_alone(example: Import) -> None:
    rotary = example("gpt").Rotary(8, 16)
    rotary.init_tables()
    q, k = (rotary(torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8))[0, 0] for _ in range(2))
    scores = q @ k.T
    for distance in range(-8, 9):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)
    assert (scores.diagonal(0)[0] - scores.diagonal(5)[0]).abs() > 1e-3


# The data


def data(example: Import, **changes: int) -> Any:
    settings = {"seq_len": 32, "batch_size": 6, "rank": 0, "ranks": 2, "seed": 0} | changes
    return example("text_data").TextData(TEXT, **settings)


def test_batches_follow_from_seed_and_step(example: Import) -> None:
    inputs, targets = data(example).train_batch(5)
    assert inputs.shape == targets.shape == (3, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, data(example).train_batch(5)[0])
    for other in (data(example, rank=1), data(example, seed=1)):
        assert not torch.equal(inputs, other.train_batch(5)[0])
    assert not torch.equal(inputs, data(example).train_batch(6)[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_divide_the_batch_that_one_process_has(example: Import, ranks: int) -> None:
    parts = [data(example, rank=rank, ranks=ranks) for rank in range(ranks)]
    whole = data(example, ranks=1)
    assert torch.equal(torch.cat([part.train_batch(5)[0] for part in parts]), whole.train_batch(5)[0])
    for index in range(4):
        windows = torch.cat([part.validation_batch(index, 4)[1] for part in parts])
        assert torch.equal(windows, whole.validation_batch(index, 4)[1])


def test_validation_windows_of_the_ranks_are_disjoint_and_cover_the_text(example: Import) -> None:
    starts = []
    for rank in range(2):
        source = data(example, rank=rank)
        source.validation = np.arange(6400) // 32 % 256  # the value tells the place
        for index in range(4):
            starts += source.validation_batch(index, 4)[0][:, 0].tolist()
    assert len(set(starts)) == 24
    assert min(starts) == 0
    assert max(starts) >= 198


def test_validation_files_are_not_trained_on(example: Import) -> None:
    text_data = example("text_data")
    files = text_data.find_files()
    train, validation = text_data.split_files(files)
    assert sorted(train + validation) == sorted(files)
    assert len(files) / 25 < len(validation) < len(files) / 15
    assert not any({"site-packages", "test"} & set(path.parts) for path in files)


def test_data_without_files_says_what_to_do(example: Import, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data"):
        example("text_data").find_files(str(tmp_path / "*.txt"))


def test_unigram_entropy(example: Import) -> None:
    entropy = example("text_data").unigram_entropy(np.array([1, 1, 2, 2, 3, 3, 4, 4], dtype=np.uint8))
    assert entropy == pytest.approx(math.log(4))


# The small parts of the scripts


def test_mesh_option(example: Import) -> None:
    parallel = example("parallel")
    for text in (*MESHES, "dp=3", "replicate=2,dp=3"):
        assert parallel.mesh_text(parallel.parse_mesh(text)) == text
    assert parallel.parse_mesh("dp=3, tp=4") == {"dp": 3, "tp": 4}
    for wrong in (
        "",
        "4",
        "dp=",
        "dp=0",
        "dp=2,tp=-1",
        "tp=2",
        "dp=2,replicate=2",
        "tp=2,dp=2",
        "replicate=2,ddp=2",
    ):
        with pytest.raises(argparse.ArgumentTypeError) as refusal:
            parallel.parse_mesh(wrong)
        assert all(form in str(refusal.value) for form in parallel.MESH_FORMS)


@pytest.mark.parametrize(
    ("mesh", "optimizer", "words"),
    [
        ("dp=2,tp=3", "dmuon", "needs 6 processes, not 4"),
        ("replicate=2,dp=2", "dmuon", "multiple of 4, not 6"),
        ("dp=1,tp=4", "adamw", "2 heads.*multiples of 4"),
        ("ddp=2,tp=2", "adamw", "DistributedDataParallel.*dp in place of ddp"),
        ("ddp=2,tp=2", "dmuon", "^$"),
        ("dp=2,tp=2", "adamw", "^$"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(example: Import, mesh: str, optimizer: str, words: str) -> None:
    parallel, gpt = example("parallel"), example("gpt").GPTConfig(width=32, heads=2)
    why = parallel.misfit(parallel.parse_mesh(mesh), 4, 6, optimizer, gpt)
    assert re.search(words, why)


def test_feed_forward_units_are_cut_evenly(example: Import) -> None:
    gpt = example("gpt").GPTConfig(width=192, heads=3)
    assert gpt.hidden % 3 != 0
    assert "512 feed-forward units" in example("parallel").misfit({"dp": 1, "tp": 3}, 3, 4, "dmuon", gpt)


def test_comparison_refuses_a_mesh_without_a_baseline(example: Import) -> None:
    compare = example("compare")
    assert compare.comparable_mesh("dp=2,tp=2") == {"dp": 2, "tp": 2}
    with pytest.raises(argparse.ArgumentTypeError, match="plain AdamW"):
        compare.comparable_mesh("ddp=2,tp=2")


def test_names_are_shortened(example: Import) -> None:
    placement = example("placement")
    assert placement.layer_of("layers.3.mlp.up_proj.weight") == "layers.3"
    assert placement.layer_of("head.weight") == "head.weight"
    names = ["layers.0.norm.weight", "layers.10.norm.weight", "head.weight", "experts.1.2.bias"]
    assert placement.templates(names) == ["layers.*.norm", "head", "experts.*.*.bias"]


def test_learning_rate_rises_then_falls_to_nothing(example: Import) -> None:
    factors = [example("train_gpt").learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10] == max(factors) == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0)
    assert factors == sorted(factors[:10]) + sorted(factors[10:], reverse=True)


def test_unfinished_checkpoints_do_not_count(example: Import, tmp_path: Path) -> None:
    checkpoints = example("checkpoints").Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    for name in ("step-00000020", "step-00000003", "step-00000030.unfinished", "step-x"):
        (tmp_path / name).mkdir()
    assert checkpoints.steps() == [3, 20]


def test_resumed_metrics_drop_what_will_be_computed_again(example: Import, tmp_path: Path) -> None:
    metrics = example("metrics")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo', encoding="utf-8")
    with metrics.Metrics(path, resumed_step=1, shown=True) as record:
        record.write(step=2, loss=2.5)
    assert metrics.read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_comparison_table(example: Import) -> None:
    compare = example("compare")
    runs = {
        name: [{"step": s, "val_loss": 5 - s * slope} for s in (0, 10, 20)]
        + [{"step": 1, "loss": 1, "seconds": slope}]
        for name, slope in (("adamw", 0.1), ("dmuon", 0.15))
    }
    runs["dmuon"].append({"step": 30, "val_loss": 0.0})  # not an equal step
    table = compare.compare(runs)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["0", "10", "20", "median time per step"]
    assert cells[1] == ["5.0000", "4.0000", "3.0000", "100 ms"]
    assert cells[2] == ["5.0000", "[bold green]3.5000[/]", "[bold green]2.0000[/]", "150 ms"]
    assert compare.steps_to_reach(runs["dmuon"], 3.0) == 20
    assert compare.steps_to_reach(runs["dmuon"], -1.0) is None


# Starting the scripts


def torchrun(script: str, *options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    return [sys.executable, *launcher, str(EXAMPLES / script), *options]


def run(command: list[str], timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def succeed(command: list[str], timeout: float = TIMEOUT) -> str:
    result = run(command, timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def losses(out: Path) -> list[tuple[int, str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = ("loss", "grad_norm", "val_loss")
    return [(row["step"], kind, row[kind]) for row in rows for kind in kinds if kind in row]


# Every mesh, in processes that have torch imported already


def train_here(folder: Path, *options: str) -> int:
    """Run `train_gpt.py` in the process group that is there; returns its exit status."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.path.append(str(EXAMPLES))
    import train_gpt

    schedule = ["--steps=6", "--checkpoint-every=3", "--val-every=3", "--warmup=2", f"--out={folder}"]
    try:
        return int(train_gpt.train(train_gpt.build_parser().parse_args([*TINY, *schedule, *options]), CPU))
    finally:
        sys.path.remove(str(EXAMPLES))
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def one_process(ranks: Ranks, tmp_path_factory: Any) -> Callable[[str], Path]:
    """The folder of an optimizer's run on one process."""

    @functools.cache
    def folder(optimizer: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(optimizer)
        assert ranks(1, train_here, folder, f"--optimizer={optimizer}") == [0]
        return folder

    return folder


RUNS = [("dmuon", mesh) for mesh in MESHES] + [("adamw", mesh) for mesh in MESHES[:-1]]


def same_losses(mine: list[tuple[int, str, float]], theirs: list[tuple[int, str, float]]) -> None:
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in theirs]
    assert [entry[2] for entry in mine] == pytest.approx([entry[2] for entry in theirs], abs=1e-4)


@pytest.mark.parametrize(("optimizer", "mesh"), RUNS)
def test_training_on_a_mesh_is_that_of_one_process(
    one_process: Callable[[str], Path],
    ranks: Ranks,
    optimizer: str,
    mesh: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = losses(one_process(optimizer))
    assert expected[-1][2] < expected[0][2] - 0.1  # it learns, so equal losses say something

    options = [f"--optimizer={optimizer}", f"--mesh={mesh}"]
    assert ranks(4, train_here, tmp_path, *options, timeout=TIMEOUT, group_timeout=TIMEOUT) == [0] * 4
    same_losses(losses(tmp_path), expected)
    shown = capsys.readouterr().out.splitlines()
    line = next(line for line in shown if line.startswith(f"{optimizer} on {mesh}: "))
    if optimizer == "dmuon":
        owners = " ".join(re.findall(r"ranks? (\S+) owns?", line))
        assert sorted(re.findall(r"\d", owners)) == ["0", "1", "2", "3"]
        tp_owners = [int(count) for count in re.findall(r"rank \d of (\d+)", line)]
        assert (len(tp_owners), sum(tp_owners)) == ((4, 14) if "tp" in mesh else (0, 0))

    # From the checkpoint of this mesh, one process goes on as if the run had always been its own.
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    assert ranks(1, train_here, tmp_path, f"--optimizer={optimizer}", "--resume") == [0]
    same_losses(losses(tmp_path), expected)


@pytest.mark.parametrize(("optimizer", "mesh"), RUNS)
def test_a_run_goes_on_on_another_mesh(
    one_process: Callable[[str], Path], ranks: Ranks, optimizer: str, mesh: str, tmp_path: Path
) -> None:
    reference = one_process(optimizer)
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    options = [f"--optimizer={optimizer}", f"--mesh={mesh}", "--resume"]
    assert ranks(4, train_here, tmp_path, *options, timeout=TIMEOUT, group_timeout=TIMEOUT) == [0] * 4
    same_losses(losses(tmp_path), losses(reference))


def test_every_rank_refuses_what_does_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as refusal:
        ranks(2, train_here, tmp_path, "--mesh=dp=1,tp=2", "--heads=1")
    assert set(refusal.value.failed) == {0, 1}
    assert str(refusal.value).count("SystemExit: --mesh dp=1,tp=2 gives 2 ranks an equal part") == 1
    assert not list(tmp_path.iterdir())


# The scripts as they are started


@pytest.mark.parametrize("script", ["train_gpt", "compare"])
def test_help_names_the_options(example: Import, script: str) -> None:
    text = example(script).build_parser().format_help()
    assert "--data" in text
    assert "(default: " in text
    if script == "train_gpt":
        assert all(mesh in text for mesh in MESHES)


def test_plain_python_is_one_process_and_refuses_a_larger_mesh(tmp_path: Path) -> None:
    options = [*TINY, "--optimizer", "adamw", "--mesh", "dp=3", "--out", str(tmp_path)]
    result = run([sys.executable, str(EXAMPLES / "train_gpt.py"), *options])
    assert result.returncode != 0
    assert result.stderr.strip() == "--mesh dp=3 needs 3 processes, not 1"


@pytest.mark.timeout(600)  # seven processes start, one after the other
def test_comparison_runs_and_a_run_resumes_exactly(ranks: Ranks, tmp_path: Path) -> None:
    schedule, mesh = ["--val-every=2", "--print-every=2"], "--mesh=dp=1,tp=2"
    compare = [sys.executable, str(EXAMPLES / "compare.py"), mesh, "--out", str(tmp_path)]
    shown = succeed(
        [*compare, "--steps=6", "--warmup=2", "--checkpoint-every=3", *schedule, *TINY], timeout=550
    )
    assert shown.startswith(
        "dmuon on dp=1,tp=2: Muon has 14 matrices: ranks 0+1 own layers.0, layers.1 (TP owners:"
    )
    assert "median time per step" in shown
    for picture in (tmp_path / "loss.png", tmp_path / "adamw/loss.png", tmp_path / "dmuon/loss.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    adamw, dmuon = losses(tmp_path / "adamw"), losses(tmp_path / "dmuon")
    assert [entry[:2] for entry in adamw] == [entry[:2] for entry in dmuon]
    assert adamw[0] == dmuon[0]  # the same initial weights: the same loss before the first step
    assert adamw != dmuon

    checkpoints = tmp_path / "dmuon" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    shutil.rmtree(checkpoints / "step-00000006")
    (checkpoints / "step-00000006.unfinished").mkdir()  # as if the last save had been cut short
    resume = [*schedule, mesh, "--optimizer=dmuon", "--resume"]
    assert ranks(2, train_here, tmp_path / "dmuon", *resume) == [0, 0]
    assert losses(tmp_path / "dmuon") == dmuon
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000003", "step-00000006"]


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes under /proc")
def test_interrupt_ends_every_rank_with_a_checkpoint(tmp_path: Path) -> None:
    options = [*TINY, "--steps", "100000", "--print-every", "1", "--mesh", f"replicate={PROCESSES},dp=1"]
    command = torchrun("train_gpt.py", *options, "--optimizer", "dmuon", "--out", str(tmp_path))
    with (tmp_path / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        shown = ""
        while "step 3/" not in shown and (line := process.stdout.readline()):
            shown += line
        ranks = children(process.pid)
        process.send_signal(signal.SIGINT)
        shown += process.communicate(timeout=TIMEOUT)[0]
    finally:
        process.kill()
    errors = (tmp_path / "stderr.txt").read_text()
    assert "stopped after step" in shown, shown + errors
    assert len(ranks) >= PROCESSES
    deadline = time.monotonic() + 10
    while alive := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.1)
    assert errors.count("Traceback") <= 1, errors  # the launcher's own, none of a rank's
    step = int(shown.split("stopped after step ")[1].split(";")[0])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{step:08d}"]
