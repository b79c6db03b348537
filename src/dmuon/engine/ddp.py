"""The base parameters under DDP: FSDP2 on rows of one rank, or torch's own DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..selection import block_modules
from .hooks import untraced
from .layout import DataParallelLayout
from .parameter import local_part


def shard_over_rows_of_one(model: nn.Module, layout: DataParallelLayout) -> None:
    """Leave the base parameters to FSDP2's HSDP, whose rows have one rank: nothing is gathered, gradients are
    all-reduced during backward."""
    for module in (*block_modules(model).values(), model):
        fully_shard(module, mesh=layout.mesh, reshard_after_forward=False)


class FirstRankWins:
    """Makes base parameters and buffers equal to the first data-parallel rank's, once, as soon as they have
    values. Buffers that training changes later (running statistics) are each rank's own from then on."""

    def __init__(self, model: nn.Module, dedicated: set[int], layout: DataParallelLayout) -> None:
        self._model = model
        self._dedicated = dedicated  # `id` of what is not touched
        self._layout = layout
        # In front of FSDP2's own hook, which reads the parameters.
        self._handle = model.register_forward_pre_hook(untraced(lambda module, args: self()), prepend=True)
        self._done = layout.replicate_size == 1

    @torch.no_grad()
    def __call__(self) -> None:
        """Collective over the data-parallel ranks, on the mesh's own process group."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if self._done or any(tensor.is_meta for tensor in tensors):
            return
        self._done = True
        self._handle.remove()
        for tensor in tensors:
            if id(tensor) not in self._dedicated:
                mine = local_part(tensor)
                theirs = mine.contiguous()
                dist.broadcast(theirs, self._layout.column[0], group=self._layout.mesh.get_group(0))
                if theirs is not mine:
                    mine.copy_(theirs)


# torch's DistributedDataParallel


def ddp_around(model: nn.Module, inner: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel in `model` whose module is `inner`."""
    wrappers = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
    return next((wrapper for wrapper in wrappers if wrapper.module is inner), None)


class Averaging:
    """Who averages base gradients: asked in every forward, since a wrapper may come after the optimizer.

    Attributes:
        needs_ddp: a base parameter whose gradient nobody averages if no DistributedDataParallel is around.
    """

    def __init__(self, model: nn.Module, layout: DataParallelLayout) -> None:
        self.needs_ddp: str | None = None
        self._model = model
        self._layout = layout
        self._known: Callable[[], DistributedDataParallel | None] = lambda: None  # has been checked

    def check_forward(self) -> None:
        """In a forward of the model, whose base parameters will get gradients.

        Raises:
            RuntimeError: on all ranks, where torch's DDP is missing.
            ValueError: as `check_wrapper`.
        """
        active = DistributedDataParallel._get_active_ddp_module()
        if active is not None and self._model not in active.modules():
            active = None
        if active is not None and self._known() is not active:
            self.check_wrapper(active)
            self.needs_ddp = None
            self._known = weakref.ref(active)
        if self.needs_ddp is not None:
            raise RuntimeError(
                f"{self.needs_ddp} is neither dedicated nor sharded, so nothing would average its gradient "
                f"over the {self._layout.size} data-parallel ranks. Train the model inside torch's "
                "DistributedDataParallel, or call dmuon.replicate(model, mesh) before dmuon.Muon."
            )

    def check_wrapper(self, wrapper: DistributedDataParallel) -> None:
        """
        Raises:
            ValueError: for a DistributedDataParallel over other ranks.
        """
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        if ranks != list(self._layout.column):
            raise ValueError(
                f"DistributedDataParallel averages over the ranks {ranks}, the dedicated parameters over "
                f"{list(self._layout.column)}; give it process_group=mesh.get_group()"
            )
