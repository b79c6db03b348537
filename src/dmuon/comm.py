"""Collectives on packed buffers, and how to wait for them.

A `Channel` is one process group with one purpose. All its collectives are issued by all its ranks in one
order; different purposes have different channels, so that a prefetch, a reduction and a publish never queue
behind each other. Every collective is asynchronous and returns a `Pending`.

`Work` handles do on both kinds of device what side streams would: gloo runs the collective in its own
threads and `wait` blocks the host; NCCL runs it on its own stream and `wait` makes the current stream wait,
without a host sync. One code path that every CPU test runs is worth more than a second one with hand-made
streams, whose only gain would be to move the packing copies off the compute stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_ALIGNMENT_BYTES = 16  # vectorized loads, and what the kernels behind matrix products like


@dataclass
class Traffic:
    """Payload this rank moved, by phase: a receiver of a broadcast and a sender of a reduction count.

    Summed over the ranks of a group of N, a buffer of `n` bytes costs `(N - 1) * n` in either direction, and
    `2 (N - 1) n` where all ranks get the sum (each counts its share of that).
    """

    collectives: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, phase: str, nbytes: int) -> None:
        """Count one collective of `phase` in which this rank moved `nbytes`."""
        self.collectives[phase] = self.collectives.get(phase, 0) + 1
        self.bytes[phase] = self.bytes.get(phase, 0) + nbytes

    def reset(self) -> None:
        """Start counting from zero."""
        self.collectives.clear()
        self.bytes.clear()


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
            try:
                self._work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"dmuon: {self._label} failed on rank {dist.get_rank()}. Either a rank has died, or not "
                    "all ranks reached this collective: what one rank gathers, all must gather."
                ) from error
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
        self._group = group
        self._traffic = traffic

    def broadcast(self, buffer: torch.Tensor, source: int, label: str) -> Pending:
        """Send `buffer` from coordinate `source` of this channel to all others, in place."""
        work = None
        if len(self._ranks) > 1:
            work = dist.broadcast(buffer, self._ranks[source], group=self._group, async_op=True)
            self._count(buffer, source)
        return self._pending(work, buffer, f"broadcast of {label}")

    def reduce(self, buffer: torch.Tensor, target: int, label: str) -> Pending:
        """Sum `buffer` over this channel into coordinate `target`; elsewhere its content is lost."""
        work = None
        if len(self._ranks) > 1:
            work = dist.reduce(buffer, self._ranks[target], group=self._group, async_op=True)
            self._count(buffer, target)
        return self._pending(work, buffer, f"reduction of {label}")

    def all_reduce(self, buffer: torch.Tensor, label: str) -> Pending:
        """Sum `buffer` over this channel, in place on all its ranks."""
        work, size = None, len(self._ranks)
        if size > 1:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            self._traffic.add(self.phase, 2 * (size - 1) * buffer.numel() * buffer.element_size() // size)
        return self._pending(work, buffer, f"all-reduce of {label}")

    def all_to_all(
        self,
        receive: torch.Tensor,
        send: torch.Tensor,
        receive_splits: list[int],
        send_splits: list[int],
        label: str,
    ) -> Pending:
        """Send consecutive parts of `send` to the ranks of this channel in turn, and receive theirs."""
        work = dist.all_to_all_single(
            receive, send, receive_splits, send_splits, group=self._group, async_op=True
        )
        mine = self._ranks.index(dist.get_rank())
        self._traffic.add(self.phase, (send.numel() - send_splits[mine]) * send.element_size())
        return self._pending(work, (receive, send), f"exchange of {label}")

    def _pending(self, work: dist.Work | None, buffers: object, label: str) -> Pending:
        return Pending(work, buffers, f"the {self.phase} {label} over ranks {list(self._ranks)}")

    def _count(self, buffer: torch.Tensor, root: int) -> None:
        at_root = self._ranks[root] == dist.get_rank()
        self._traffic.add(self.phase, 0 if at_root else buffer.numel() * buffer.element_size())


def packed_offsets(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Aligned offsets, in elements, of tensors packed one behind the other, and the total length."""
    step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += -(-numel // step) * step
    return offsets, total
