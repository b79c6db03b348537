"""Collectives on parts of packed buffers, the process groups they run on, and counting what they move.

Collectives are synchronous, for use inside a `Queue`. All ranks of a process group issue them in one order,
since all ranks put the same work into the same queues. Each queue has process groups of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from .layout import DataParallelLayout, per_world
from .queue import Queue
from .tensor_parallel import TensorParallel

ProcessGroups = Literal["isolated", "shared"]
Parts = Sequence[tuple[int, torch.Tensor]]  # position in the group, and what comes from there or goes there

# torch 2.13 has given it another name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_RULE = "what one rank gathers or reduces, all of its group must"


@dataclass
class Traffic:
    """Payload this rank moved, by phase: a receiver of a broadcast and a sender of a reduction count.

    A collective is one launch: the broadcasts of all owners of a group are one.

    Summed over the ranks of a group of N, a buffer of `n` bytes costs `(N - 1) * n` in either direction, and
    `2 (N - 1) n` where all ranks get the sum (each counts its share of that).

    `listener`, if set, is called after each collective with phase, label, begin and end (ns since the epoch;
    on CUDA that of its launch).
    """

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    listener: Callable[[str, str, int, int], None] | None = None

    def add(self, phase: str, nbytes: int) -> None:
        """Count one collective of `phase` in which this rank moved `nbytes`."""
        self.collectives[phase] = self.collectives.get(phase, 0) + 1
        self.bytes[phase] = self.bytes.get(phase, 0) + nbytes

    def reset(self) -> None:
        """Start counting from zero."""
        self.collectives.clear()
        self.bytes.clear()


@contextlib.contextmanager
def explained(collective: str, rule: str) -> Iterator[None]:
    """Say of a collective that fails inside which one it was, and the rule for reaching it.

    Raises:
        RuntimeError: for any of torch's errors.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"dmuon: {collective} failed on rank {dist.get_rank()}. Either a rank has died, or not all ranks "
            f"reached this collective: {rule}."
        ) from error


class Peers:
    """The ranks of one process group, in its order."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.position = self.ranks.index(dist.get_rank())
        self._group = group
        self._device = device
        # gloo has no grouped launches; there they are a loop.
        backend = group._get_backend(device) if group is not None else None
        self._can_group = backend is not None and backend.supports_coalescing
        self._options: dict[tuple[type, int], Any] = {}

    def broadcast(self, parts: Parts) -> int:
        """Send each part from its position to all others, in place, as one launch. Returns the bytes that
        this rank has received."""
        assert self._group is not None
        with self._launch(len(parts)):
            for root, part in parts:
                self._finish(self._group.broadcast([part], self._rooted(dist.BroadcastOptions, root)))
        return sum(part.nbytes for root, part in parts if root != self.position)

    def reduce(self, parts: Parts) -> int:
        """Sum each part over all ranks into its position, as one launch; elsewhere its content is lost.
        Returns the bytes that this rank has sent."""
        assert self._group is not None
        with self._launch(len(parts)):
            for root, part in parts:
                self._finish(self._group.reduce([part], self._rooted(dist.ReduceOptions, root)))
        return sum(part.nbytes for root, part in parts if root != self.position)

    def all_reduce(self, buffer: torch.Tensor) -> int:
        """Sum over all ranks, in place. Returns this rank's share of the bytes moved."""
        dist.all_reduce(buffer, group=self._group)
        return 2 * (self.size - 1) * buffer.nbytes // self.size

    def all_to_all(
        self, receive: torch.Tensor, send: torch.Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> int:
        """Send consecutive parts of `send` to the ranks in turn, receive theirs. Returns the bytes sent."""
        dist.all_to_all_single(receive, send, receive_splits, send_splits, group=self._group)
        return (send.numel() - send_splits[self.position]) * send.element_size()

    def all_gather(self, all_parts: torch.Tensor, part: torch.Tensor) -> int:
        """One part from each rank, of one size, to all. Returns the bytes received."""
        _all_gather(all_parts, part, group=self._group)
        return all_parts.nbytes - part.nbytes

    def connect(self) -> None:
        """Make the connections now, by the kinds of collectives that will be used: NCCL makes them at the
        first one and blocks the host until all ranks are there, where later on each might be at another."""
        one = torch.zeros(1, device=self._device)
        self.broadcast([(0, one)])
        self.reduce([(0, one)])
        many = torch.zeros(self.size, device=self._device)
        self.all_to_all(torch.empty_like(many), many, [1] * self.size, [1] * self.size)
        self.all_gather(many, one)

    @contextlib.contextmanager
    def _launch(self, count: int) -> Iterator[None]:
        """The collectives inside are one launch, on a backend that can."""
        if count < 2 or not self._can_group:
            yield
            return
        assert self._group is not None
        # As torch's own `_coalescing_manager`, which would batch some kinds of collectives in its own way.
        self._group._start_coalescing(self._device)
        try:
            yield
        finally:
            self._finish(self._group._end_coalescing(self._device))

    def _rooted(self, kind: type, root: int) -> Any:
        options = self._options.get((kind, root))
        if options is None:
            options = self._options[kind, root] = kind()
            options.rootRank, options.asyncOp = root, False
        return options

    @staticmethod
    def _finish(work: Any) -> None:
        """A backend that has not waited, or ordered streams, by itself gives a handle."""
        if work is not None:
            work.wait()


class Communication:
    """The queues and process groups of one model; making the latter is collective, once for all models.

    Attributes:
        weights: the queue of gathers and publishes, ahead of other work on CUDA.
        gradients: the queue of reductions and exchanges.
        traffic: of this model.
        publishes: something may still be on its way to those who keep a copy.
    """

    def __init__(
        self,
        layout: DataParallelLayout,
        cuts: Sequence[TensorParallel],
        process_groups: ProcessGroups,
    ) -> None:
        self.traffic = Traffic()
        self.publishes = False
        self._device = layout.device
        self._peers: dict[tuple[str, tuple[int, ...]], Peers] = {}
        isolated = process_groups == "isolated"
        made = per_world()
        key = ("queues", self._device, isolated)
        if key not in made:
            made[key] = (
                Queue("weights", self._device, beside=isolated, urgent=True),
                Queue("gradients", self._device, beside=isolated),
            )
        self.weights, self.gradients = made[key]
        wanted = _wanted(layout, cuts)
        if isolated:
            self._isolate(layout, cuts, wanted)
        else:
            self._share(layout, cuts, wanted)

    def broadcast(self, phase: str, label: str, ranks: tuple[int, ...], parts: Parts) -> None:
        """Of the weights queue: each part from its position in `ranks` to all of them."""
        self._run(phase, label, "weights", ranks, lambda peers: peers.broadcast(parts))

    def reduce(self, phase: str, label: str, ranks: tuple[int, ...], parts: Parts) -> None:
        """Of the gradients queue: each part summed into its position in `ranks`."""
        self._run(phase, label, "gradients", ranks, lambda peers: peers.reduce(parts))

    def all_reduce(self, phase: str, label: str, ranks: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Of the gradients queue: the sum over `ranks`."""
        self._run(phase, label, "gradients", ranks, lambda peers: peers.all_reduce(buffer))

    def all_to_all(
        self,
        phase: str,
        label: str,
        ranks: tuple[int, ...],
        receive: torch.Tensor,
        send: torch.Tensor,
        receive_splits: list[int],
        send_splits: list[int],
    ) -> None:
        """Of the gradients queue in the phase "exchange", else of the weights queue; see `Peers`."""
        queue = "gradients" if phase == "exchange" else "weights"
        self._run(
            phase, label, queue, ranks, lambda p: p.all_to_all(receive, send, receive_splits, send_splits)
        )

    def team(self, label: str, ranks: tuple[int, ...]) -> TeamPeers:
        """Of the weights queue: what a team needs to orthogonalize matrices together."""
        return TeamPeers(self, label, ranks)

    def _run(
        self, phase: str, label: str, queue: str, ranks: tuple[int, ...], collective: Callable[[Peers], int]
    ) -> None:
        peers = self._peers[queue, ranks]
        begin = time.time_ns()
        try:
            nbytes = collective(peers)
        except RuntimeError as error:
            some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            with explained(f"the {phase} of {label} over the {len(ranks)} ranks {some}", _RULE):
                raise error
        self.traffic.add(phase, nbytes)
        if self.traffic.listener is not None:
            self.traffic.listener(phase, label, begin, time.time_ns())

    def _isolate(
        self,
        layout: DataParallelLayout,
        cuts: Sequence[TensorParallel],
        wanted: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        """Process groups of our own: those that no model has made yet, in one order on all ranks."""
        made: dict = per_world()
        missing = [want for want in wanted if want not in made]
        _agree_on(len(missing), layout, cuts)
        timeout = _timeout(layout.device)
        for queue, ranks in missing:
            # Local synchronization: the groups of other rows and columns are none of our business.
            group = dist.new_group(
                list(ranks),
                timeout=timeout,
                use_local_synchronization=True,
                pg_options=_priority(layout.device, urgent=queue == "weights"),
                group_desc=f"dmuon_{queue}",
            )
            made[queue, ranks] = Peers(ranks, group, layout.device)
        if layout.device.type != "cpu":
            for want in missing:
                made[want].connect()
        self._peers = {want: made[want] for want in wanted}

    def _share(
        self,
        layout: DataParallelLayout,
        cuts: Sequence[TensorParallel],
        wanted: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        """The meshes' own process groups, which FSDP2 and tensor parallelism use as well.

        Raises:
            ValueError: for pieces cut by several mesh dims, which have none.
        """
        groups = [g for mesh in (layout.mesh, *(cut.mesh for cut in cuts)) for g in mesh.get_all_groups()]
        by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
        for queue, ranks in wanted:
            if ranks not in by_ranks:
                raise ValueError(
                    f'process_groups="shared": no single mesh dim has a process group of the ranks {ranks}, '
                    'which hold the pieces of a matrix; use "isolated"'
                )
            self._peers[queue, ranks] = Peers(ranks, by_ranks[ranks], layout.device)


class TeamPeers:
    """The ranks of a team, for its Newton-Schulz in the weights queue."""

    def __init__(self, communication: Communication, label: str, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        self.position = ranks.index(dist.get_rank())
        self._communication = communication
        self._label = label
        self._ranks = ranks

    def reduce_scatter(self, addends: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """The sum over all ranks of what is for this one, [splits[position]]; rounded once, to the dtype of
        the addends: by one all_to_all, since a reduce_scatter would round at every rank and takes no uneven
        blocks.

        addends: what this rank adds for each rank in turn, [sum(splits)].
        """
        own = splits[self.position]
        receive = addends.new_empty(self.size, own)
        self._communication._run(
            "team_reduce",
            self._label,
            "weights",
            self._ranks,
            lambda peers: peers.all_to_all(receive.view(-1), addends, [own] * self.size, splits),
        )
        return receive.sum(0, dtype=torch.promote_types(addends.dtype, torch.float32)).to(addends.dtype)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, of one size: [size, numel of a part]."""
        parts = part.new_empty(self.size, part.numel())
        self._communication._run(
            "team_gather",
            self._label,
            "weights",
            self._ranks,
            lambda peers: peers.all_gather(parts.view(-1), part),
        )
        return parts


def _wanted(layout: DataParallelLayout, cuts: Sequence[TensorParallel]) -> list[tuple[str, tuple[int, ...]]]:
    """Which queue talks to which ranks; in one order on all ranks, each once."""
    wanted = [("weights", layout.row), ("gradients", layout.row)]
    wanted += [("weights", layout.column), ("gradients", layout.column)]
    for cut in cuts:
        wanted += [("gradients", cut.copies), ("gradients", cut.ranks), ("weights", cut.ranks)]
    return [want for want in dict.fromkeys(wanted) if len(want[1]) > 1]


def _agree_on(count: int, layout: DataParallelLayout, cuts: Sequence[TensorParallel]) -> None:
    """Make sure that all ranks are about to make as many process groups; else some would wait for ever.

    They would, too, where some ranks have more groups than others already, since torch names new ones by
    that: who has fewer makes some of itself alone.

    Raises:
        RuntimeError: on all ranks.
    """
    held = len(dist.distributed_c10d._world.pg_names)
    extremes = torch.tensor([count, -count, held], dtype=torch.int64, device=layout.device)
    for mesh in dict.fromkeys((layout.mesh, *(cut.mesh for cut in cuts))):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                with explained("agreeing on process groups", "all ranks build dmuon.Muon, or run forward"):
                    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least, most_held = int(extremes[0]), -int(extremes[1]), int(extremes[2])
    if most != least:
        raise RuntimeError(
            f"the ranks do not agree on the process groups to make: between {least} and {most} are missing. "
            "Give dmuon the same models, meshes and predicates on all ranks, in the same order."
        )
    for _ in range(most_held - held if count else 0):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _timeout(device: torch.device) -> timedelta | None:
    """The timeout the user gave to `init_process_group`; None (the backend's default) if it is not known."""
    world = dist.group.WORLD
    backend = world._get_backend(device) if world is not None else None
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _priority(device: torch.device, *, urgent: bool) -> Any:
    """Options of a process group whose kernels go before those of others; None: the backend's own."""
    if not urgent or device.type != "cuda" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
