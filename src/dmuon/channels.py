"""The channels of one model: which process groups there are, and for what."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from .comm import Channel, Traffic, side_stream
from .layout import DataParallelLayout
from .parameter import DedicatedParam
from .pipeline import Pipeline
from .scratch import Scratch

ProcessGroups = Literal["isolated", "shared"]


class Channels:
    """The channels of one model; making them is collective over all its ranks.

    "isolated" makes process groups of our own, which lets our collectives and FSDP2's be issued without
    regard to each other; "shared" uses the meshes' own groups, which saves connections on very large jobs.
    Isolated groups take over the timeout of the default process group.

    Attributes:
        gather: weights, from the owner to its row.
        reduce: gradients, from the row to the owner's column.
        reduce_replicas: gradients, from the owner's column to the owner.
        sum_copies: gradients, over the ranks of the owner row that hold the same piece; by these ranks.
        exchange: gradients (or Gram matrices), from the owner row's pieces to the TP owners; by the ranks of
            the TP group.
        publish_exchange: updates (or factors), from the TP owners to the owner row's pieces.
        publish: updated weights, from the owner to those who keep a copy: its column, under DDP its row.
        base: gradients of the base parameters under `replicate`, averaged over the row.
        side: where the later stages of reductions run, on CUDA.
        publishing: the publishes in flight.
        has_gram_stage: publishes start with a stage of Gram matrices, in which the rest takes no part.
        gather_scratch, scatter_scratch: buffers of exchanges to the TP owners and back.
        traffic: what this rank has moved.
    """

    def __init__(
        self,
        layout: DataParallelLayout,
        params: Iterable[DedicatedParam],
        process_groups: ProcessGroups,
        *,
        replicates_base: bool = False,
        reuse_gather: bool = False,
        reuse_scatter: bool = False,
    ) -> None:
        self.traffic = Traffic()
        self.side = side_stream(layout.device)
        self.publishing: Pipeline[None] = Pipeline()
        self.has_gram_stage = False
        self.gather_scratch = Scratch(reuse_gather)
        self.scatter_scratch = Scratch(reuse_scatter)
        self._isolated = process_groups == "isolated"
        self._timeout = _timeout(layout)
        row, column = layout.row, layout.column
        row_group = layout.mesh.get_group(layout.mesh.ndim - 1)
        column_group = layout.mesh.get_group(0) if layout.mesh.ndim == 2 else None
        self.gather = self._channel("gather", row, row_group)
        self.reduce = self._channel("reduce", row, row_group)
        self.reduce_replicas = self._channel("reduce_replicas", column, column_group)
        copies_group = row_group if layout.replicated else column_group
        self.publish = self._channel("publish", layout.publish_ranks, copies_group)
        self.base = self._channel("base", row, row_group) if replicates_base else None
        self.sum_copies: dict[tuple[int, ...], Channel] = {}
        self.exchange: dict[tuple[int, ...], Channel] = {}
        self.publish_exchange: dict[tuple[int, ...], Channel] = {}
        for param in params:  # in module order, so that all ranks make their groups in the same order
            if param.tp is not None and len(param.tp.copies) > 1 and param.tp.copies not in self.sum_copies:
                ranks = param.tp.copies
                self.sum_copies[ranks] = self._channel("sum_copies", ranks, param.tp.shared_group(ranks))
            if param.tp is not None and param.is_cut and param.tp.ranks not in self.exchange:
                ranks = param.tp.ranks
                self.exchange[ranks] = self._channel("exchange", ranks, param.tp_group)
                self.publish_exchange[ranks] = self._channel("publish_exchange", ranks, param.tp_group)

        if layout.device.type != "cpu":
            for channel in self._every():
                channel.connect(layout.device)

    def _every(self) -> list[Channel]:
        """In the order in which they were made, the same on all ranks."""
        first = [self.gather, self.reduce, self.reduce_replicas, self.publish]
        if self.base is not None:
            first.append(self.base)
        return [*first, *self.sum_copies.values(), *self.exchange.values(), *self.publish_exchange.values()]

    def _channel(self, phase: str, ranks: tuple[int, ...], shared: dist.ProcessGroup | None) -> Channel:
        group = None
        if len(ranks) > 1:
            # Pieces cut by several mesh dims have no group to share: it is made in either case.
            group = self._new_group(phase, ranks) if self._isolated or shared is None else shared
        return Channel(phase, ranks, group, self.traffic)

    def _new_group(self, phase: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        # Local synchronization: the groups of other rows and columns are none of our business, and all ranks
        # create theirs in the same order of phases, so that no two wait for each other.
        return dist.new_group(
            list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=f"dmuon_{phase}"
        )


def _timeout(layout: DataParallelLayout) -> timedelta | None:
    """The timeout the user gave to `init_process_group`; None (the backend's default) if it is not known."""
    world = dist.group.WORLD
    backend = world._get_backend(layout.device) if world is not None else None
    return getattr(getattr(backend, "options", None), "_timeout", None)
