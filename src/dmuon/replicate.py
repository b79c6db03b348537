"""The base parameters under DDP: equal on all data-parallel ranks, their gradients averaged during backward.

Buckets of parameters in reverse module order are all-reduced as soon as their gradients are complete, each
in its turn, on a channel of its own. torch's DistributedDataParallel around the base parameters does as well
(it keeps off the dedicated ones); these calls are for models that it does not take, such as those cut by
tensor parallelism, and save a wrapper whose name would be in every parameter's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .comm import Channel, Pending
from .layout import DataParallelLayout, wrap_local
from .packed import PackedGradients
from .parameter import local_part

_BUCKET_BYTES = 25 * 2**20  # as for torch's DDP

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # what DistributedDataParallel asks a module for


@dataclass
class _Bucket:
    """Base parameters whose gradients travel together; of one dtype and device."""

    params: list[nn.Parameter]
    number: int
    arrived: set[int] = field(default_factory=set)  # id of those that have a gradient, in this backward
    expected: int | None = None  # how many are to have one; None: not counted in this backward
    launched: bool = False

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.requires_grad]

    @property
    def is_complete(self) -> bool:
        if self.expected is None:
            self.expected = len(self.trainable)
        return len(self.arrived) >= self.expected


class Replicas:
    """The base parameters of one model, kept equal on all data-parallel ranks.

    Every backward all-reduces every bucket, on all ranks in one order, zeros standing for what a rank has no
    gradient for; a parameter that no rank has one for keeps `grad` as it was.
    """

    def __init__(
        self, model: nn.Module, dedicated: Iterable[nn.Parameter], layout: DataParallelLayout
    ) -> None:
        self.model = model
        self.layout = layout
        self._dedicated = {id(param) for param in dedicated}
        self._buckets: list[_Bucket] = []
        self._flights: list[tuple[list[nn.Parameter], PackedGradients, Pending]] = []
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}  # gradients from before the running backward
        self._next = 0
        self._equal = False

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The base parameters, by name; frozen ones too, since they may be unfrozen."""
        return {n: p for n, p in self.model.named_parameters() if id(p) not in self._dedicated}

    def start(self, channel: Channel, advance: Callable[[], None]) -> None:
        """Make the buckets and hook the parameters; `advance` is called whenever a gradient has arrived."""
        self._channel = channel
        self._advance = advance
        params = list(self.params.values())[::-1]
        for number, members in enumerate(_pack(params)):
            self._buckets.append(_Bucket(members, number))
        reference = weakref.ref(self)  # autograd keeps hooks where the garbage collector finds no cycles
        for bucket in self._buckets:
            for param in bucket.params:
                wants_gradient = param.requires_grad
                param.requires_grad_(True)  # else a frozen one takes no hook

                def arrived(param: torch.Tensor, bucket: _Bucket = bucket) -> None:
                    replicas = reference()
                    if replicas is not None:
                        bucket.arrived.add(id(param))
                        replicas._advance()

                param.register_post_accumulate_grad_hook(arrived)
                param.requires_grad_(wants_gradient)
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Once, as soon as there are values: take over the first rank's parameters and buffers.

        Buffers that training changes later (running statistics) are each rank's own from then on.
        """
        if self._equal:
            return
        tensors = [local_part(t) for t in (*self.params.values(), *self.model.buffers())]
        if any(tensor.is_meta for tensor in tensors):
            return
        self._equal = True
        for members in _pack(tensors):
            buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in members])
            self._channel.broadcast(buffer, 0, "the base parameters").wait()
            for tensor, part in zip(members, buffer.split([t.nbytes for t in members]), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    # Gradients

    def begin(self) -> None:
        """The beginning of a backward: lay gradients of earlier ones aside, for `restore` if it raises."""
        for param in self._all_params():
            if param.grad is not None:
                self._earlier[param], param.grad = param.grad, None

    @torch.no_grad()
    def end_without_reduction(self) -> None:
        """The end of a backward under `no_sync`: add its gradients to the earlier ones, on this rank."""
        for param, earlier in self._earlier.items():
            if param.grad is not None:
                earlier.add_(param.grad)
            param.grad = earlier
        self._earlier.clear()
        self.reset()

    def restore(self) -> None:
        """After a backward that raised: all gradients are those from before it."""
        for param in self._all_params():
            param.grad = self._earlier.get(param)
        self._earlier.clear()

    def _all_params(self) -> Iterator[nn.Parameter]:
        return (param for bucket in self._buckets for param in bucket.params)

    def reduce_complete(self) -> None:
        """Start the all-reduces whose turn it is."""
        while self._next < len(self._buckets) and self._buckets[self._next].is_complete:
            bucket = self._buckets[self._next]
            if not bucket.launched:
                self._launch(bucket)
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        """Start the all-reduce of what has arrived. The parameters lose their gradients to the buffer.

        One that was accumulated before travels along: it is the same on all ranks, and so is their mean.
        """
        earlier = {} if bucket.launched else self._earlier
        bucket.launched = True
        params = bucket.trainable
        if not params:
            return
        packed = PackedGradients(
            [_take_gradient(param, earlier.get(param)) for param in params],
            [local_part(param).shape for param in params],
            params[0].dtype,
            self.layout.device,
            self.layout.size,
        )
        pending = self._channel.all_reduce(packed.buffer, f"bucket {bucket.number} of the base parameters")
        self._flights.append((params, packed, pending))

    @torch.no_grad()
    def finish(self) -> None:
        """The end of backward: reduce the rest, and put the averages on the parameters."""
        for bucket in self._buckets:
            late = bucket.launched and any(param.grad is not None for param in bucket.trainable)
            if not bucket.launched or late:  # late: run again by recomputation, after the launch
                self._launch(bucket)
        for params, packed, pending in self._flights:
            pending.wait()
            packed.average()
            # A host sync only if this rank had none of something.
            had = packed.had if all(packed.had) else (packed.counts > 0).tolist()
            for param, view, any_had in zip(params, packed.views, had, strict=True):
                if any_had:
                    _add_gradient(param, view)
        for param, earlier in self._earlier.items():
            if not param.requires_grad:  # frozen meanwhile: nothing has taken it along
                param.grad = earlier
        self._earlier.clear()
        self.reset()

    def reset(self) -> None:
        """Forget what belongs to one backward."""
        for *_, pending in self._flights:
            pending.wait()
        self._flights.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.arrived.clear()
            bucket.expected = None
            bucket.launched = False


def _pack(tensors: list[Any]) -> Iterator[list[Any]]:
    """Consecutive tensors of one dtype and device, up to the bucket size."""
    members: list[Any] = []
    size = 0
    for tensor in tensors:
        nbytes = local_part(tensor).nbytes
        kind = (tensor.dtype, tensor.device)
        if members and ((members[0].dtype, members[0].device) != kind or size + nbytes > _BUCKET_BYTES):
            yield members
            members, size = [], 0
        members.append(tensor)
        size += nbytes
    if members:
        yield members


def _take_gradient(param: nn.Parameter, earlier: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of the gradient and an `earlier` one, cut as the parameter is; it loses its gradient.

    As under FSDP2, collective over the tensor-parallel ranks where it comes as a Partial sum (under sequence
    parallelism), or cut otherwise.
    """
    gradient, param.grad = param.grad, None
    if earlier is not None:
        gradient = earlier if gradient is None else earlier + gradient
    if isinstance(gradient, DTensor):
        assert isinstance(param, DTensor)
        if gradient.placements != param.placements:
            gradient = gradient.redistribute(placements=param.placements)
        return gradient._local_tensor
    return gradient


def _add_gradient(param: nn.Parameter, average: torch.Tensor) -> None:
    """Set the gradient, which stays a part of the buffer, or add to it. average: of the local part."""
    if isinstance(param, DTensor):
        average = wrap_local(average, param.shape, param.device_mesh, param.placements)
    if param.grad is None:
        param.grad = average
    else:
        param.grad.add_(average)


# torch's DistributedDataParallel


def hide_from_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Leave parameters to us when `DistributedDataParallel(model)` is built."""
    model.__dict__[_IGNORED] = [*getattr(model, _IGNORED, ()), *names]


def ddp_around(model: nn.Module, inner: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel in `model` whose module is `inner`."""
    wrappers = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
    return next((wrapper for wrapper in wrappers if wrapper.module is inner), None)


def ddp_ranks(wrapper: DistributedDataParallel) -> list[int]:
    """The global ranks over which a DistributedDataParallel averages."""
    return dist.get_process_group_ranks(wrapper.process_group)
