"""What one rank of the benchmark does: all peers, on one mesh after the other."""

from __future__ import annotations

import gc
import json
import logging
import signal
import statistics
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from contestant import SETTLING, Contestant, mean_losses, prepare
from control import Control, own_mesh
from machine import describe
from model import Task
from pace import too_slow
from parallel import mesh_text
from peer import Peer, Unfit, find_peers
from rounds import Turn, play, time_contestant, time_newton_schulz

PATIENCE = timedelta(seconds=120)  # of a collective; the first call of compiled code is in it


@dataclass(frozen=True)
class Job:
    """One benchmark, as every rank is told."""

    contests: list[tuple[dict[str, int], Task]]
    folders: list[Path]
    only: list[str]
    rounds: int
    iterations: int
    steps: int
    warmup: int
    threads: int
    result: Path  # where the first rank writes what was measured, as JSON


def work(rank: int, world_size: int, store: Path, job: Job) -> None:
    """A rank's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # torch's advice on DTensors
    torch.set_num_threads(job.threads)
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=world_size, timeout=PATIENCE
    )
    control = Control(2 * PATIENCE)
    console = Console(quiet=rank != 0, highlight=False)
    meshes = [contest(sizes, task, job, control, console) for sizes, task in job.contests]
    if rank == 0:
        result = {"machine": describe(), "ranks": world_size, "meshes": meshes}
        job.result.write_text(json.dumps(result, indent=1), encoding="utf-8")
    control.barrier()
    dist.destroy_process_group()


def contest(
    sizes: dict[str, int], task: Task, job: Job, control: Control, console: Console
) -> dict[str, Any]:
    """All peers on one mesh; returns a row of results for each."""
    title = mesh_text(sizes) + (f", {task.experts} experts" if task.experts else "")
    rows, contestants, turns = [], {}, {}
    for peer in find_peers(job.folders, job.only):
        row = {"file": peer.file, "name": peer.name, "update": peer.update, "note": peer.note, "error": ""}
        rows.append(row)
        console.print(f"{title}: {peer.name} ...")
        prepared, row["error"] = control.attempt(lambda peer=peer: enter(peer, sizes, task, job))
        if prepared is None:
            console.print(f"  not here: {row['error']}", markup=False, soft_wrap=True)
            gc.collect()
            continue
        contestant, counts = prepared
        row |= across_ranks(control.gather(counts))
        contestants[peer.file] = contestant
        turns |= turns_of(contestant, job, control)

    gc.collect()
    gc.freeze()  # the collector need not walk through all these models in somebody's turn
    console.print(f"{title}: {job.rounds} rounds", end="")
    play(list(turns.values()), job.rounds, control, lambda number: console.print(".", end=""))
    console.print()
    gc.unfreeze()
    for row in rows:
        if row["file"] in contestants:
            row |= readings(row["file"], turns)
        if not row["error"]:
            row["loss"] = mean_losses(contestants[row["file"]], SETTLING + 1 + job.warmup, control)
    return {"mesh": title, "task": task.describe(), "peers": rows}


def enter(peer: Peer, sizes: dict[str, int], task: Task, job: Job) -> tuple[Contestant, dict[str, Any]]:
    """Prepare a peer, on a mesh of its own."""
    mesh = own_mesh(sizes)
    if reason := peer.why_not(mesh):
        raise Unfit(reason)
    if not job.only and (reason := too_slow(peer, task)):
        raise Unfit(reason)
    return prepare(peer, task, mesh, job.warmup)


def turns_of(contestant: Contestant, job: Job, control: Control) -> dict[str, Turn]:
    """The contestant's turn, and that of its Newton-Schulz alone if it has one, by name."""
    file = contestant.peer.file
    turns = {file: Turn(time_contestant(contestant, job.iterations, job.steps, control))}
    if (loop := contestant.peer.newton_schulz(contestant.model)) is not None:
        turns[f"{file}/newton_schulz"] = Turn(time_newton_schulz(loop, job.steps, control))
    return turns


def readings(file: str, turns: dict[str, Turn]) -> dict[str, Any]:
    """Seconds of the slowest rank, one value a round; of several readings in a round, their mean."""
    turn, loop = turns[file], turns.get(f"{file}/newton_schulz")
    row: dict[str, Any] = {"error": turn.error}
    if not turn.error:
        row["iteration"] = [values[0] for values in turn.readings]
        row["step"] = [statistics.fmean(values[1::2]) for values in turn.readings]
        row["settled"] = [statistics.fmean(values[2::2]) for values in turn.readings]
    if loop is not None and not loop.error:
        row["newton_schulz"] = [statistics.fmean(values) for values in loop.readings]
    return row


def across_ranks(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """One iteration's counts: a list with each rank's for collectives, bytes, rest and peak."""
    row: dict[str, Any] = {key: [rank[key] for rank in counts] for key in ("rest", "peak")}
    row["operators"] = [{"collectives": rank["collectives"], "bytes": rank["bytes"]} for rank in counts]
    row["collectives"] = [sum(rank["collectives"].values()) for rank in counts]
    row["bytes"] = [sum(rank["bytes"].values()) for rank in counts]
    row["unknown"] = sorted({name for rank in counts for name in rank["unknown"]})
    return row
