"""Train the same model on the same text with AdamW and with dmuon, and show both side by side.

    python examples/compare.py
    python examples/compare.py --steps 200 --out runs/wide --width 192 --mesh dp=4

Both runs have the same initial weights, the same batches and the same number of steps. Options that this
script does not know are passed on to `train_gpt.py`, whose first lines say which parameters live where.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # until the first run starts, Ctrl-C ends without a traceback

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metrics import LABELS, Row, curve, plot_losses, read_metrics
from parallel import lacks_baseline, mesh_text, parse_mesh
from text_data import find_files, read_tokens, split_files, unigram_entropy

HERE = Path(__file__).parent
OPTIMIZERS = ("adamw", "dmuon")  # as the table has them; dmuon trains first
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 45.0  # seconds for a run to end after a signal; its launcher itself kills after 30


def comparable_mesh(text: str) -> dict[str, int]:
    """As `parse_mesh`, for meshes on which both optimizers train."""
    sizes = parse_mesh(text)
    if reason := lacks_baseline(sizes):
        raise argparse.ArgumentTypeError(reason)
    return sizes


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the same model with AdamW and with dmuon, and compare them in a table and a "
        "picture. Options not listed here go to train_gpt.py.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--mesh",
        type=comparable_mesh,
        default="dp=2,tp=2",
        metavar="SIZES",
        help="of each run, with as many processes; the forms are those of train_gpt.py",
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument(
        "--data", metavar="GLOB", help="text files; default: Python's standard library sources"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="where the runs and the picture go"
    )
    return parser


def launch(command: list[str], environment: Mapping[str, str], errors: Path) -> int:
    """Run a command to its end, its standard error in a file; returns the exit status.

    On KeyboardInterrupt the command is told to end too, and waited for, before the exception goes on.
    """
    # A session of its own, so that Ctrl-C reaches the launcher once, from here. A second signal would make it
    # leave before its workers have ended.
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, env=environment, stderr=stderr, start_new_session=True)
        try:
            return process.wait()
        except KeyboardInterrupt:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # it is ending; asking again would not make it faster
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def train(optimizer: str, args: argparse.Namespace, extra: list[str]) -> list[Row]:
    """One run; returns its metrics. Raises SystemExit with the end of its standard error if it fails."""
    out = args.out / optimizer
    out.mkdir(parents=True, exist_ok=True)
    processes = math.prod(args.mesh.values())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes)]
    command += [str(HERE / "train_gpt.py"), "--optimizer", optimizer, "--out", str(out), "--overwrite"]
    command += ["--mesh", mesh_text(args.mesh)]
    command += ["--steps", str(args.steps), "--checkpoint-every", str(args.steps)]
    command += ["--data", args.data] if args.data else []
    threads = max(1, (os.cpu_count() or 1) // processes)
    errors = out / "stderr.txt"
    status = launch(command + extra, {**os.environ, "OMP_NUM_THREADS": str(threads)}, errors)
    if status != 0:
        lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
        raise SystemExit("\n".join([*lines[-40:], f"the {optimizer} run failed; all it said is in {errors}"]))
    return read_metrics(out / "metrics.jsonl")


def steps_to_reach(rows: list[Row], loss: float) -> int | None:
    """The first step at which a run's validation loss was at most `loss`."""
    return next((step for step, value in zip(*curve(rows, "val_loss"), strict=True) if value <= loss), None)


def compare(runs: Mapping[str, list[Row]]) -> Table:
    """Validation losses at equal steps, and the median time per step, one column per optimizer."""
    table = Table()
    table.add_column("step", justify="right")
    for name in runs:
        table.add_column(LABELS[name], justify="right")

    losses = {name: dict(zip(*curve(rows, "val_loss"), strict=True)) for name, rows in runs.items()}
    shared = sorted(set.intersection(*(set(values) for values in losses.values())))
    for step in shared:
        best = min(values[step] for values in losses.values())
        cells = [f"{values[step]:.4f}" for values in losses.values()]
        marked = [f"[bold green]{cell}[/]" if cell == f"{best:.4f}" else cell for cell in cells]
        table.add_row(str(step), *(marked if step else cells), end_section=step == shared[-1])

    times = (statistics.median(curve(rows, "seconds")[1]) for rows in runs.values())
    table.add_row("median time per step", *(f"{1e3 * seconds:.0f} ms" for seconds in times))
    return table


def demo(args: argparse.Namespace, extra: list[str], console: Console) -> None:
    """Both runs, then the picture and the table."""
    # Each run says first what it is, on which mesh, and where its parameters live.
    finished = {name: train(name, args, extra) for name in reversed(OPTIMIZERS)}
    runs = {name: finished[name] for name in OPTIMIZERS}

    baseline = unigram_entropy(read_tokens(split_files(find_files(args.data))[1]))
    picture = args.out / "loss.png"
    plot_losses(picture, runs, "The same model, text and batches with AdamW and with dmuon", baseline)
    console.rule("Validation loss (nats per byte) at equal steps", align="left")
    console.print(compare(runs))
    console.print(f"A model that knows the frequencies of bytes and nothing else: {baseline:.4f}.")
    target = curve(runs["adamw"], "val_loss")[1][-1]
    reached = steps_to_reach(runs["dmuon"], target)
    if reached is not None and reached < args.steps:
        console.print(f"dmuon is at AdamW's final loss by step {reached} of {args.steps}.")
    console.print(f"Curves of both: {picture}", soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    args, extra = build_parser().parse_known_args(argv)
    console = Console()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        demo(args, extra, console)
    except KeyboardInterrupt:
        console.print(f"stopped; what there is of the runs is under {args.out}")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
