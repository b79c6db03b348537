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
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from .layout import DataParallelLayout

ProcessGroups = Literal["isolated", "shared"]

_ALIGNMENT_BYTES = 16  # vectorized loads, and what the kernels behind matrix products like


@dataclass
class Traffic:
    """Payload this rank moved, by phase: a receiver of a broadcast and a sender of a reduction count.

    Summed over the ranks of a group of N, a buffer of `n` bytes costs `(N - 1) * n` in either direction.
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
    """A collective in flight. Keeps its buffer alive until it is waited for."""

    def __init__(self, work: dist.Work | None, buffer: torch.Tensor, label: str) -> None:
        self._work = work
        self._buffer: torch.Tensor | None = buffer
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
        self._work = self._buffer = None

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

    def _pending(self, work: dist.Work | None, buffer: torch.Tensor, label: str) -> Pending:
        return Pending(work, buffer, f"the {self.phase} {label} over ranks {list(self._ranks)}")

    def _count(self, buffer: torch.Tensor, root: int) -> None:
        at_root = self._ranks[root] == dist.get_rank()
        self._traffic.add(self.phase, 0 if at_root else buffer.numel() * buffer.element_size())


@dataclass(frozen=True)
class Channels:
    """The channels of one model."""

    gather: Channel  # weights, from the owner to its row
    reduce: Channel  # gradients, from the row to the owner's column
    reduce_replicas: Channel  # gradients, from the owner's column to the owner
    publish: Channel  # updated weights, from the owner to its column
    traffic: Traffic
    isolated: bool  # whether the order between our collectives and others' is free

    @classmethod
    def create(cls, layout: DataParallelLayout, process_groups: ProcessGroups) -> Channels:
        """Create the channels; collective over the data-parallel ranks.

        "isolated" makes process groups of our own, which lets our collectives and FSDP2's be issued without
        regard to each other; "shared" uses the mesh's own groups, which saves connections on very large
        jobs. Isolated groups take over the timeout of the default process group.
        """
        traffic = Traffic()

        def channel(phase: str, mesh_dim: int | None, ranks: tuple[int, ...]) -> Channel:
            if len(ranks) == 1 or mesh_dim is None:
                return Channel(phase, ranks, None, traffic)
            if process_groups == "shared":
                group = layout.mesh.get_group(mesh_dim)
            else:
                # Local synchronization: the groups of other rows and columns are none of our business, and
                # all ranks create theirs in the same order of phases, so that no two wait for each other.
                group = dist.new_group(
                    list(ranks),
                    timeout=_timeout(layout),
                    use_local_synchronization=True,
                    group_desc=f"dmuon_{phase}",
                )
            return Channel(phase, ranks, group, traffic)

        shard_dim = layout.mesh.ndim - 1
        replicate_dim = 0 if layout.mesh.ndim == 2 else None
        return cls(
            gather=channel("gather", shard_dim, layout.row),
            reduce=channel("reduce", shard_dim, layout.row),
            reduce_replicas=channel("reduce_replicas", replicate_dim, layout.column),
            publish=channel("publish", replicate_dim, layout.column),
            traffic=traffic,
            isolated=process_groups == "isolated",
        )


def _timeout(layout: DataParallelLayout) -> timedelta | None:
    """The timeout the user gave to `init_process_group`; None (the backend's default) if it is not known."""
    world = dist.group.WORLD
    backend = world._get_backend(layout.device) if world is not None else None
    return getattr(getattr(backend, "options", None), "_timeout", None)


def packed_offsets(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Aligned offsets, in elements, of tensors packed one behind the other, and the total length."""
    step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    offsets, total = [], 0
    for numel in numels:
        offsets.append(total)
        total += -(-numel // step) * step
    return offsets, total
