"""Whole training iterations and `step()` alone, of several distributed optimizers side by side.

    python benchmarks/step.py
    python benchmarks/step.py --mesh dp=4 --width 512 --layers 8 --peers my_peers

Writes tables, a picture and all measured values to benchmarks/results; benchmarks/README.md says how to read
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch.multiprocessing as mp
from rich.console import Console

# The model and its meshes are those of the examples.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPTConfig
from machine import cores
from model import Task
from parallel import mesh_text, misfit, parse_mesh
from peer import find_peers
from report import Report
from train_gpt import positive_int
from worker import Job, work

HERE = Path(__file__).resolve().parent
MESHES = ("dp=4", "replicate=2,dp=2", "dp=2,tp=2")
GRACE = 5.0  # seconds for the processes to end after they were told to


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time whole training iterations and step() alone, for FSDP2 with AdamW, dmuon, other "
        "implementations of Muon, and yours, in the same processes; count collectives, bytes and memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    contest = parser.add_argument_group("who and where")
    contest.add_argument(
        "--mesh",
        type=parse_mesh,
        action="append",
        metavar="SIZES",
        help="a mesh to run on; repeat it for more meshes of as many processes. "
        "dp=4: FSDP2. replicate=2,dp=2: HSDP. dp=2,tp=2: with tensor parallelism. "
        f"Without it: {'  '.join(MESHES)}",
    )
    contest.add_argument(
        "--peers",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with a file for each further optimizer (see benchmarks/README.md)",
    )
    contest.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FILE",
        help="a peer to run, by its file; repeat it",
    )
    contest.add_argument(
        "--baseline", default="fsdp2_adamw", metavar="FILE", help="the peer that the others are compared with"
    )

    model = parser.add_argument_group("model")
    model.add_argument("--width", type=positive_int, default=256)
    model.add_argument("--layers", type=positive_int, default=4)
    model.add_argument("--heads", type=positive_int, default=4)
    model.add_argument("--vocab", type=positive_int, default=256)
    model.add_argument(
        "--tokens", type=positive_int, default=512, help="of an iteration, per rank (per TP group under TP)"
    )
    model.add_argument("--seq-len", type=positive_int, default=128, help="tokens per sequence")
    model.add_argument(
        "--experts",
        type=int,
        default=8,
        metavar="N",
        help="on the first mesh without tp, the model runs with N experts a layer as well; 0: it does not",
    )
    model.add_argument("--seed", type=int, default=0, help="of the initial weights and the batches")

    method = parser.add_argument_group("method")
    method.add_argument(
        "--rounds", type=positive_int, default=5, help="in each, every peer is timed once, in another order"
    )
    method.add_argument(
        "--iterations",
        type=positive_int,
        default=3,
        help="whole iterations a peer is timed for in a round",
    )
    method.add_argument(
        "--steps", type=positive_int, default=2, help="step() alone, so many times in a round as well"
    )
    method.add_argument("--warmup", type=positive_int, default=3, help="iterations before the first round")
    method.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="per process; by default cores / processes",
    )
    method.add_argument("--timeout", type=float, default=1200.0, help="seconds after which all is given up")
    method.add_argument(
        "--out", type=Path, default=HERE / "results", help="step.md, step.png and step.json go here"
    )
    return parser


def refusal(args: argparse.Namespace, gpt: GPTConfig) -> str:
    """Why this cannot be run; empty if it can."""
    world_size = math.prod(args.mesh[0].values())
    if args.tokens % args.seq_len:
        return f"--tokens {args.tokens} is not a multiple of --seq-len {args.seq_len}"
    if args.experts and (args.experts < 0 or args.seq_len % args.experts):
        return f"--experts {args.experts} does not divide --seq-len {args.seq_len}"
    for sizes in args.mesh:
        if "ddp" in sizes:
            return f"--mesh {mesh_text(sizes)}: all peers here build on fully_shard; use dp"
        if math.prod(sizes.values()) != world_size:
            texts = " and ".join(mesh_text(other) for other in (args.mesh[0], sizes))
            return f"--mesh {texts} are of different numbers of processes; run them one by one"
        if reason := misfit(sizes, world_size, args.tokens // args.seq_len * world_size, "dmuon", gpt):
            return reason
    files = [peer.file for peer in find_peers(args.peers, args.only)]
    return "" if args.baseline in files else f"--baseline {args.baseline} is none of {', '.join(files)}"


def run(job: Job, world_size: int, timeout: float) -> None:
    """Start the ranks and wait for them.

    Raises:
        TimeoutError: after `timeout` seconds.
        torch.multiprocessing.ProcessException: if a rank fails.
    """
    os.environ |= {"OMP_NUM_THREADS": str(job.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; no look-up of the host's name
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(work, (world_size, Path(folder) / "store", job), world_size, join=False)
        try:
            while not context.join(timeout=1.0, grace_period=GRACE):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done after {timeout:.0f} s (--timeout)")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    args.mesh = args.mesh or [parse_mesh(text) for text in MESHES]
    gpt = GPTConfig(args.vocab, args.width, args.layers, args.heads, args.seq_len)
    try:
        if reason := refusal(args, gpt):
            parser.error(reason)
    except ValueError as error:  # of the peers' folders
        parser.error(str(error))

    world_size = math.prod(args.mesh[0].values())
    args.out.mkdir(parents=True, exist_ok=True)
    values = args.out / "step.json"
    task = Task(gpt, args.tokens, args.seed)
    contests = [(sizes, task) for sizes in args.mesh]
    for sizes in [sizes for sizes in args.mesh if args.experts and "tp" not in sizes][:1]:
        contests.append((sizes, replace(task, experts=args.experts)))
    job = Job(
        contests=contests,
        folders=args.peers,
        only=args.only,
        rounds=args.rounds,
        iterations=args.iterations,
        steps=args.steps,
        warmup=args.warmup,
        threads=args.threads or max(1, cores() // world_size),
        result=values,
    )
    load = os.getloadavg()[0]
    try:
        run(job, world_size, args.timeout)
    except (mp.ProcessException, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130

    result = json.loads(values.read_text(encoding="utf-8"))
    result |= {
        "command": shlex.join(["python", "benchmarks/step.py", *(sys.argv[1:] if argv is None else argv)]),
        "load": load,
        "baseline": args.baseline,
        "method": f"{args.rounds} rounds of {args.iterations} iterations and {args.steps} steps each",
    }
    values.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report = Report(result)
    report.print(Console())
    readme = Path(os.path.relpath(Path(__file__).with_name("README.md"), args.out)).as_posix()
    (args.out / "step.md").write_text(report.markdown(readme), encoding="utf-8")
    report.draw(args.out / "step.png")
    print(f"\nwrote {args.out}/step.md, step.png, step.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
