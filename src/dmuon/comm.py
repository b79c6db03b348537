"""Collectives on packed buffers, and how to wait for them.

A `Channel` is one process group with one purpose. All its collectives are issued by all its ranks in one
order; different purposes have different channels, so that a prefetch, a reduction and a publish never queue
behind each other. Every collective is asynchronous and returns a `Pending`.

`Work` handles do on both kinds of device most of what side streams would: gloo runs the collective in its own
threads and `wait` blocks the host; NCCL runs it on its own stream and `wait` makes the current stream wait,
without a host sync. What they cannot do is to start one collective when another one is over, without either
of them in the way of the computation: on CPU we look now and then whether it is over, on CUDA a `SideStream`
waits for it.

A running torch profiler shows where each collective is issued, as `dmuon::<phase> <label>`, and on CUDA its
kernels under the same name. When it is over on CPU, `timeline` tells.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

_RULE = "what one rank gathers, all must gather"
_ALIGNMENT_BYTES = 16  # vectorized loads, and what the kernels behind matrix products like


@dataclass
class Traffic:
    """Payload this rank moved, by phase: a receiver of a broadcast and a sender of a reduction count.

    `on_issue`, if set, is called for each collective when it has been issued.

    Summed over the ranks of a group of N, a buffer of `n` bytes costs `(N - 1) * n` in either direction, and
    `2 (N - 1) n` where all ranks get the sum (each counts its share of that).
    """

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    on_issue: Callable[[str, str, int, dist.Work], None] | None = None  # phase, label, time in ns, work

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


class Pending:
    """A collective in flight. Keeps its buffers alive until it is waited for."""

    def __init__(self, work: dist.Work | None, buffers: object, label: str) -> None:
        self._work = work
        self._buffers = buffers
        self._label = label

    def wait(self) -> None:
        """Wait: the host on CPU, the current stream on CUDA.

        Raises:
            RuntimeError: if the collective failed or timed out; it names the collective and the group.
        """
        if self._work is not None:
            with explained(self._label, _RULE):
                self._work.wait()
        self._work = self._buffers = None

    @classmethod
    def nothing(cls) -> Pending:
        """For a rank that has no part in a stage."""
        return cls(None, None, "nothing")

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()


class Channel:
    """One process group and one purpose (`phase`): packed buffers, in one order on all its ranks."""

    def __init__(
        self, phase: str, ranks: Sequence[int], group: dist.ProcessGroup | None, traffic: Traffic
    ) -> None:
        self.phase = phase
        self._ranks = tuple(ranks)
        self._where = f"over ranks {list(ranks)}"  # made once: there may be thousands
        self._group = group
        self._traffic = traffic

    def connect(self, device: torch.device) -> None:
        """Make the connections of the process group now, on all its ranks.

        NCCL makes them at the first collective, and blocks the host until all ranks are there: later on, each
        might be there for another process group first.
        """
        if len(self._ranks) > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)

    def broadcast(self, buffer: torch.Tensor, source: int, label: str) -> Pending:
        """Send `buffer` from coordinate `source` of this channel to all others, in place."""
        work = None
        if len(self._ranks) > 1:
            work = self._issue(label, dist.broadcast, buffer, self._ranks[source])
            self._count(buffer, source)
        return Pending(work, buffer, self._name(label))

    def reduce(self, buffer: torch.Tensor, target: int, label: str) -> Pending:
        """Sum `buffer` over this channel into coordinate `target`; elsewhere its content is lost."""
        work = None
        if len(self._ranks) > 1:
            work = self._issue(label, dist.reduce, buffer, self._ranks[target])
            self._count(buffer, target)
        return Pending(work, buffer, self._name(label))

    def all_reduce(self, buffer: torch.Tensor, label: str) -> Pending:
        """Sum `buffer` over this channel, in place on all its ranks."""
        work, size = None, len(self._ranks)
        if size > 1:
            work = self._issue(label, dist.all_reduce, buffer)
            self._traffic.add(self.phase, 2 * (size - 1) * buffer.numel() * buffer.element_size() // size)
        return Pending(work, buffer, self._name(label))

    def all_to_all(
        self,
        receive: torch.Tensor,
        send: torch.Tensor,
        receive_splits: list[int],
        send_splits: list[int],
        label: str,
    ) -> Pending:
        """Send consecutive parts of `send` to the ranks of this channel in turn, and receive theirs."""
        work = self._issue(label, dist.all_to_all_single, receive, send, receive_splits, send_splits)
        mine = self._ranks.index(dist.get_rank())
        self._traffic.add(self.phase, (send.numel() - send_splits[mine]) * send.element_size())
        return Pending(work, (receive, send), self._name(label))

    def _issue(self, label: str, collective: Callable[..., dist.Work], *args: Any) -> dist.Work:
        """Issue a collective, under its name for profilers."""
        begin = time.time_ns()
        # A range costs microseconds even if nobody records it.
        profiled = torch.autograd._profiler_enabled()
        name = f"dmuon::{self.phase} {label}" if profiled else ""
        with (
            record_function(name) if profiled else contextlib.nullcontext(),
            explained(self._name(label), _RULE),
        ):
            work = collective(*args, group=self._group, async_op=True)
        if self._traffic.on_issue is not None:
            self._traffic.on_issue(self.phase, label, begin, work)
        return work

    def _name(self, label: str) -> str:
        return f"the {self.phase} of {label} {self._where}"

    def _count(self, buffer: torch.Tensor, root: int) -> None:
        at_root = self._ranks[root] == dist.get_rank()
        self._traffic.add(self.phase, 0 if at_root else buffer.numel() * buffer.element_size())


class SideStream:
    """The CUDA stream on which reductions of several collectives go from one to the next.

    The host, which runs ahead of the device, issues them all at once; so their order is the same on all
    ranks (NCCL asks for that across process groups, too), where to look whether one is over would make it
    depend on the moment. The stream of the computation does not wait for them before the end of backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """What is done inside comes after all that the current stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, buffer: torch.Tensor) -> None:
        """Nobody else gets the memory of a buffer, once it is freed, before this stream is done with it."""
        buffer.record_stream(self._stream)

    def join(self) -> None:
        """What the current stream is given from now on comes after all that this one has been given."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def side_stream(device: torch.device) -> SideStream | None:
    """One where streams are to be had."""
    return SideStream(device) if device.type == "cuda" else None


def packed_offsets(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Aligned offsets, in elements, of tensors packed one behind the other, and the total length."""
    step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += -(-numel // step) * step
    return offsets, total
