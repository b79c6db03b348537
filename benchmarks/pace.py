"""Whether a peer would hold up the contest, on a processor that lacks the instructions for its dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dmuon.optim.newton_schulz import operation_count
from model import Task
from newton_schulz import rate
from peer import Peer
from settings import NS_STEPS, matrices_and_others

LONGEST_STEP = 2.0  # seconds of Newton-Schulz


def too_slow(peer: Peer, task: Task) -> str:
    """Why a peer is left out unless it is asked for; empty if it is not.

    Its Newton-Schulz is taken to be shared out over all ranks.
    """
    if peer.dtype is None:
        return ""
    with torch.device("meta"):
        matrices, _ = matrices_and_others(task.model())
    operations = sum(
        matrix.shape[:-2].numel() * operation_count(*matrix.shape[-2:], steps=NS_STEPS, algorithm="direct")
        for matrix in matrices
    )
    seconds = operations / dist.get_world_size() / rate(peer.dtype, torch.device("cpu"))
    if seconds <= LONGEST_STEP:
        return ""
    dtype = str(peer.dtype).removeprefix("torch.")
    return (
        f"its Newton-Schulz is in {dtype} and would take more than {LONGEST_STEP:.0f} s a step, where this "
        f"processor has no instructions for {dtype}; --only {peer.file} runs it all the same"
    )
