"""A peer in the ring: its model and its optimizer, built and warmed up, with what was counted on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from control import Control
from counting import Collectives
from memory import Ledger
from model import Batch, Task, loss_of
from parallel import data_parallel_place
from peer import Peer

SETTLING = 3  # iterations: FSDP2 and dmuon learn the order of modules, optimizers make their state


class Contestant:
    """One peer on one mesh. All contestants see the same batches in the same order."""

    def __init__(self, peer: Peer, task: Task, mesh: DeviceMesh) -> None:
        self.peer, self.task = peer, task
        self.place, self.places = data_parallel_place(mesh)
        self.model, self.optimizer = peer.build(task.model(), mesh)
        self.losses: list[torch.Tensor] = []  # of this rank, by iteration
        self._drawn = 0

    def batches(self, count: int) -> list[Batch]:
        """The next batches of this rank."""
        first, self._drawn = self._drawn, self._drawn + count
        return [self.task.batch(i, self.place, self.places) for i in range(first, self._drawn)]

    def gradients(self, batch: Batch) -> None:
        """An iteration without its step."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        self.losses.append(loss.detach())

    def iterate(self, batch: Batch) -> None:
        """A whole iteration."""
        self.gradients(batch)
        self.optimizer.step()

    def finish(self) -> None:
        """Wait for what the last step has started."""
        self.peer.finish(self.optimizer)


def prepare(peer: Peer, task: Task, mesh: DeviceMesh, warmup: int) -> tuple[Contestant, dict[str, Any]]:
    """Build a contestant, count its collectives and its memory, and warm it up.

    Returns:
        The contestant, and this rank's counts of one iteration: `collectives` and `bytes` by operator,
        `unknown`, and bytes of memory at `rest` (weights, optimizer state; no gradients) and at the `peak`.
    """
    contestant, counts = count(peer, task, mesh)
    for batch in contestant.batches(warmup):
        contestant.iterate(batch)
    contestant.finish()
    return contestant, counts


@torch.compiler.set_stance("force_eager")  # compiled code would hide its operators
def count(peer: Peer, task: Task, mesh: DeviceMesh) -> tuple[Contestant, dict[str, Any]]:
    """`prepare` without the warm-up."""
    with Ledger() as ledger:
        contestant = Contestant(peer, task, mesh)
        *settling, last = contestant.batches(SETTLING + 1)
        for batch in settling:
            contestant.iterate(batch)
        contestant.optimizer.zero_grad()
        contestant.finish()
        with ledger.window():
            contestant.iterate(last)
            contestant.finish()
    with Collectives(contestant.model) as spy:
        contestant.iterate(*contestant.batches(1))
        contestant.finish()
    return contestant, {
        "collectives": dict(spy.calls),
        "bytes": dict(spy.bytes),
        "unknown": sorted(spy.unknown),
        "rest": ledger.rest,
        "peak": ledger.peak,
    }


def mean_losses(contestant: Contestant, warm: int, control: Control) -> dict[str, float]:
    """Losses over the whole batch: of the first iteration, of the one after the warm-up, and of the last."""
    mine = [contestant.losses[index].item() for index in (0, warm, -1)]
    of_ranks = control.gather(mine)
    first, after, last = (sum(column) / dist.get_world_size() for column in zip(*of_ranks, strict=True))
    return {"first": first, "warm": after, "last": last}
