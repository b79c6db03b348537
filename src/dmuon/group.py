"""The dedicated parameters of one hook boundary: gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

from .comm import Channels, Pending, packed_offsets
from .layout import DataParallelLayout, Owner
from .parameter import DedicatedParam, Version

Residency = Literal["until_backward_done", "while_used"]
HandOver = Callable[[], None]


@dataclass(frozen=True)
class Precision:
    """Dtypes of one group; None keeps the resting dtype (`compute`) or the compute dtype (`reduce`)."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


class Bucket:
    """The parameters of one group that one owner keeps, in one dtype: one buffer, one collective a phase.

    The buffer's storage is resized to nothing and back, and never replaced: what autograd saved of the
    gathered parameters are views of it, and they are valid again as soon as it is filled again.
    """

    def __init__(
        self, params: Sequence[DedicatedParam], channels: Channels, precision: Precision, label: str
    ) -> None:
        first = params[0]
        self.params = tuple(params)
        self.layout: DataParallelLayout = first.layout
        self.owner: Owner = first.coordinate
        self.label = label
        self.master_dtype = first.resting.dtype
        self.dtype = precision.compute or self.master_dtype
        self.reduce_dtype = precision.reduce or self.dtype
        self._channels = channels
        self._filled: tuple[Version, ...] | None = None  # what the buffer holds; None: nothing
        self._gathering: Pending | None = None
        self._publishing: tuple[Pending, torch.Tensor, list[DedicatedParam]] | None = None
        with torch.inference_mode(False):  # a first forward in inference mode must not spoil training
            offsets, total = packed_offsets([p.full_shape.numel() for p in params], self.dtype)
            self._buffer = torch.empty(total, dtype=self.dtype, device=self.layout.device)
            for param, view in zip(self.params, self._views(self._buffer, offsets), strict=True):
                # Through .data: a version counter of its own, which filling the buffer leaves alone. It wants
                # a gradient for now, so that a frozen one can take a hook; showing it sets what holds.
                param.gathered = nn.Parameter(view.data)
        self._offsets = offsets
        self._nbytes = self._buffer.untyped_storage().nbytes()
        self._free()

    def _views(self, buffer: torch.Tensor, offsets: Sequence[int]) -> Iterator[torch.Tensor]:
        """One view of a packed buffer per parameter, in its full shape."""
        for param, offset in zip(self.params, offsets, strict=True):
            yield buffer[offset : offset + param.full_shape.numel()].view(param.full_shape)

    # Gather and release

    @property
    def _versions(self) -> tuple[Version, ...]:
        return tuple(param.version for param in self.params)

    @torch.no_grad()
    def gather(self) -> None:
        """Start to bring the owner's weights to every rank, unless the buffer holds them already."""
        if self._filled == self._versions:
            return
        self._settle_gather()
        self._publish_if_never_done()
        if self._buffer.untyped_storage().nbytes() == 0:
            self._buffer.untyped_storage().resize_(self._nbytes)
        if self.layout.keeps_weight(self.owner):
            views = list(self._views(self._buffer, self._offsets))
            torch._foreach_copy_(views, [param.local for param in self.params])
        self._filled = self._versions
        self._gathering = self._channels.gather.broadcast(self._buffer, self.owner.shard, self.label)

    def wait_gathered(self) -> None:
        """Wait for the gather; the gathered parameters may be read afterwards."""
        self._settle_gather()

    def release(self) -> None:
        """Free the gathered weights."""
        self._settle_gather()
        self._free()

    def _free(self) -> None:
        self._buffer.untyped_storage().resize_(0)
        self._filled = None

    def _settle_gather(self) -> None:
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the gathered weights."""
        mine = self._buffer.untyped_storage()
        return mine.nbytes() > 0 and tensor.untyped_storage().data_ptr() == mine.data_ptr()

    # Reduce

    @torch.no_grad()
    def reduce(self) -> Generator[Pending, None, HandOver]:
        """Average the gradients to the owner; yields each collective it has to wait for, one per stage.

        Behind the packed gradients, the buffer has one element per parameter that counts the ranks which had
        a gradient: the only way to tell "zero" from "none" afterwards. Returns what remains to be done at the
        end of backward: to add to the gradients of the resting parameters. Not before, so that a backward
        that raises leaves them as they were.
        """
        params = [param for param in self.params if param.resting.requires_grad]
        if not params:
            return lambda: None
        numels = [param.full_shape.numel() for param in params]
        offsets, total = packed_offsets(numels, self.reduce_dtype)
        buffer = torch.empty(total + len(params), dtype=self.reduce_dtype, device=self.layout.device)
        views = [
            buffer[o : o + n].view(p.full_shape) for p, o, n in zip(params, offsets, numels, strict=True)
        ]
        had = self._pack(params, views, buffer[total:])
        if total > sum(numels):  # padding travels too; it must not be read uninitialised
            for offset, numel, end in zip(offsets, numels, [*offsets[1:], total], strict=True):
                buffer[offset + numel : end].zero_()

        # A sum of float16 overflows where a mean would not: there, divide before.
        before = self.reduce_dtype == torch.float16
        if before:
            buffer.div_(self.layout.size)
        yield self._channels.reduce.reduce(buffer, self.owner.shard, self.label)
        if self.layout.keeps_weight(self.owner):
            yield self._channels.reduce_replicas.reduce(buffer, self.owner.replicate, self.label)
        is_owner = self.layout.is_owner(self.owner)
        if is_owner and not before:
            buffer[:total].div_(self.layout.size)

        def hand_over() -> None:
            for param, view, mine, count in zip(params, views, had, buffer[total:], strict=True):
                if is_owner:
                    param.add_gradient(view, None if mine else count)
                else:
                    param.add_gradient(None, None)

        return hand_over

    def _pack(
        self, params: Sequence[DedicatedParam], views: Sequence[torch.Tensor], counts: torch.Tensor
    ) -> list[bool]:
        """Move the gathered parameters' gradients to the buffer; zeros where this rank has none."""
        gradients = [_gathered(param).grad for param in params]
        had = [gradient is not None for gradient in gradients]
        pairs = [(view, grad) for view, grad in zip(views, gradients, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        counts.fill_(1)  # filled, not copied from a Python list: no transfer from the host
        for view, count, mine in zip(views, counts, had, strict=True):
            if not mine:
                view.zero_()
                count.zero_()
        for param in params:
            _gathered(param).grad = None
        return had

    # Publish

    @torch.no_grad()
    def publish(self, params: Iterable[DedicatedParam]) -> None:
        """Start to send these parameters' weights from the owner to its HSDP replicas."""
        self.wait_published()
        chosen = list(params)
        for param in chosen:
            param.published = param.version
        if self.layout.replicate_size == 1 or not self.layout.keeps_weight(self.owner):
            return
        offsets, total = packed_offsets([p.full_shape.numel() for p in chosen], self.master_dtype)
        buffer = torch.zeros(total, dtype=self.master_dtype, device=self.layout.device)
        if self.layout.is_owner(self.owner):
            for param, offset in zip(chosen, offsets, strict=True):
                buffer[offset : offset + param.local.numel()].copy_(param.local.view(-1))
        pending = self._channels.publish.broadcast(buffer, self.owner.replicate, self.label)
        self._publishing = (pending, buffer, chosen)
        for param in chosen:
            param.before_read = self.wait_published

    @torch.no_grad()
    def wait_published(self) -> None:
        """Wait for a publish in flight, and take over what it brought."""
        if self._publishing is None:
            return
        (pending, buffer, params), self._publishing = self._publishing, None
        for param in params:
            param.before_read = None
        pending.wait()
        if self.layout.is_owner(self.owner):
            return
        offsets, _ = packed_offsets([p.full_shape.numel() for p in params], self.master_dtype)
        for param, offset in zip(params, offsets, strict=True):
            param.local.view(-1).copy_(buffer[offset : offset + param.local.numel()])

    def _publish_if_never_done(self) -> None:
        """Make the replicas equal to the owner where something else than a step has changed the weights."""
        if self.layout.replicate_size == 1:
            return
        stale = [param for param in self.params if param.published != param.version]
        if stale:
            self.publish(stale)
            self.wait_published()


class DedicatedGroup:
    """The parameters of one hook boundary, as buckets; the only state machine of the engine.

    Attributes:
        ran: the group takes part in the next reduction: it has run in a forward with gradients, or has been
            reached by a backward, since the last one.
        reached: the running backward has come to one of its outputs.
        launched: its reduction has started, in the running backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        channels: Channels,
        residency: Residency,
        precision: Precision,
    ) -> None:
        self.name = name or "the root module"
        self.module = module
        self.params = tuple(params)
        self.residency: Residency = residency
        self.precision = precision
        self._channels = channels
        self.buckets: list[Bucket] = []
        self.depth = 0  # how many calls of the module's forward are under way
        self.ran = False
        self.launched = False
        self.reached = False
        self._arrived = 0
        self._on_gradient: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"DedicatedGroup({self.name}, {len(self.params)} parameters, {len(self.buckets)} buckets)"

    @property
    def version(self) -> tuple[Version, ...]:
        """The versions of all its weights."""
        return tuple(param.version for param in self.params)

    # Weights

    def gather(self) -> None:
        """Start to bring the full weights to every rank."""
        self._build_buckets()
        for bucket in self.buckets:
            bucket.gather()

    def wait_gathered(self) -> None:
        """Wait until the full weights are here."""
        for bucket in self.buckets:
            bucket.wait_gathered()

    def release(self) -> None:
        """Free the full weights."""
        for bucket in self.buckets:
            bucket.release()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the group's gathered weights, and must not outlive them."""
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)  # wrappers have no storage to ask for
        return is_plain and any(bucket.holds(tensor) for bucket in self.buckets)

    def wait_published(self) -> None:
        """Wait until no publish of these weights is in flight."""
        for bucket in self.buckets:
            bucket.wait_published()

    def publish(self, updated: set[DedicatedParam]) -> None:
        """Start to publish those parameters of the group that have been updated."""
        self._build_buckets()
        for bucket in self.buckets:
            chosen = [param for param in bucket.params if param in updated]
            if chosen:
                bucket.publish(chosen)

    def show_gathered(self) -> None:
        """Put the gathered parameters on their modules."""
        for param in self.params:
            param.show_gathered()

    def show_resting(self) -> None:
        """Put the resting parameters on their modules."""
        for param in self.params:
            param.show_resting()

    def _build_buckets(self) -> None:
        """Pack the parameters into buckets; again after a change of dtype or device."""
        for param in self.params:
            param.refresh()
            if param.resting.is_meta:
                raise RuntimeError(
                    f"{param.param_name} is still on the meta device. Call model.to_empty(device=...) and "
                    "initialise the weights before the first forward."
                )
        if self.buckets and all(p.resting.dtype == b.master_dtype for b in self.buckets for p in b.params):
            return
        self.release()
        by_key: dict[tuple[int, torch.dtype], list[DedicatedParam]] = {}
        for param in self.params:
            slot = param.layout.slot_of(param.coordinate)
            by_key.setdefault((slot, param.resting.dtype), []).append(param)
        self.buckets = [
            Bucket(params, self._channels, self.precision, f"group {self.name!r}, owner slot {slot}")
            for (slot, _), params in sorted(by_key.items(), key=lambda item: (item[0][0], str(item[0][1])))
        ]
        for param in self.params:
            _gathered(param).register_post_accumulate_grad_hook(self._gradient_arrived)

    # Gradients

    def on_gradient(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a gradient of the group has arrived."""
        self._on_gradient = callback

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        self.ran = True
        self._arrived += 1
        if self._on_gradient is not None:
            self._on_gradient()

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the group wants a gradient."""
        return any(param.resting.requires_grad for param in self.params)

    @property
    def all_arrived(self) -> bool:
        """Whether every trainable parameter of the group has its gradient, in the running backward."""
        return self._arrived >= sum(param.resting.requires_grad for param in self.params)

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether a gradient came after the group's reduction had started (a module run again by
        recomputation within one backward)."""
        return any(p.gathered is not None and p.gathered.grad is not None for p in self.params)

    def reduce(self) -> list[Reduction]:
        """Start the reductions of the group, one per bucket."""
        self.launched = True
        return [Reduction(bucket.reduce()) for bucket in self.buckets]

    def end_backward(self) -> None:
        """Forget what belongs to one backward, and let go of the weights."""
        self.ran = self.reached = self.launched = False
        self._arrived = 0
        self.release()

    def abort(self) -> None:
        """Drop what an iteration that raised has left behind."""
        for param in self.params:
            if param.gathered is not None:
                param.gathered.grad = None
        self.depth = 0
        self.show_resting()
        self.end_backward()


class Reduction:
    """A bucket's reduction under way: stages that each wait for one collective, then the hand-over."""

    def __init__(self, stages: Generator[Pending, None, HandOver]) -> None:
        self.stage = -1
        self._stages = stages
        self._pending: Pending | None = None
        self._hand_over: HandOver | None = None
        self.advance()

    @property
    def done(self) -> bool:
        """Whether the averaged gradients are where they belong."""
        return self._hand_over is not None

    def is_ready(self) -> bool:
        """Whether `advance` would not have to wait."""
        return self._pending is None or self._pending.is_completed()

    def advance(self) -> None:
        """Wait for the collective of this stage and start the next one."""
        if self._pending is not None:
            self._pending.wait()
        try:
            self._pending = next(self._stages)
        except StopIteration as end:
            self._pending, self._hand_over = None, end.value
        self.stage += 1

    def hand_over(self) -> None:
        """Add the averaged gradients to those of the resting parameters."""
        assert self._hand_over is not None
        self._hand_over()


def _gathered(param: DedicatedParam) -> nn.Parameter:
    assert param.gathered is not None
    return param.gathered
