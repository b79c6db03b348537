"""The parameters of one group that one owner keeps, in one dtype: one buffer, one collective a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .base import Schedule
from .channels import Channels
from .comm import Pending, packed_offsets
from .exchange import Cut, Exchange
from .layout import DataParallelLayout, Owner
from .packed import PackedGradients
from .parameter import DedicatedParam, Version
from .pipeline import Operation, Stages
from .tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Precision:
    """Dtypes of one group; None keeps the model's dtype (`compute`) or the compute dtype (`reduce`)."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def compute_dtype(self, param: DedicatedParam) -> torch.dtype:
        """In which a weight is gathered."""
        return self.compute or param.compute_dtype or param.resting.dtype

    def reduce_dtype(self, param: DedicatedParam) -> torch.dtype:
        """In which its gradient is reduced."""
        return self.reduce or self.compute_dtype(param)


class GramForm(Protocol):
    """A matrix in pieces, of which only a small part travels; see `dmuon.optim.distributed_gram`."""

    def gram(self) -> torch.Tensor:
        """What this rank's piece contributes, flat; the contributions are summed."""

    def factor(self, gram: torch.Tensor) -> torch.Tensor:
        """What the ranks need, flat and of the same size, from the sum."""

    def orthogonal(self, factor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the orthogonalized matrix."""


@dataclass(frozen=True)
class Update:
    """What a step wants done to one weight.

    Attributes:
        orthogonal: the whole orthogonalized matrix, on the rank that ran Newton-Schulz; None elsewhere.
        apply: `apply(weight, orthogonal)` updates a weight, or corresponding pieces, in place; None if the
            weight is to stay as it is.
        gram: what is orthogonalized in pieces, on the ranks that hold one.
    """

    orthogonal: torch.Tensor | None = None
    apply: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    gram: GramForm | None = None


HandOver = Callable[[], None]


class Bucket:
    """Parameters that travel together, packed in one buffer.

    The buffer's storage is resized to nothing and back, and never replaced: what autograd saved of the
    gathered parameters are views of it, and they are valid again as soon as it is filled again.

    Under tensor parallelism every rank's buffer holds its own pieces, and the exchange brings those of the
    owner row together.

    Under DDP the buffer is never emptied, and where the compute dtype is the master dtype, the owner's
    weights at rest are their parts of it.
    """

    def __init__(
        self, params: Sequence[DedicatedParam], channels: Channels, precision: Precision, label: str
    ) -> None:
        first = params[0]
        self.params = tuple(params)
        self.layout: DataParallelLayout = first.layout
        self.owner: Owner = first.coordinate
        self.label = label
        self.in_pieces = first.in_pieces
        self.master_dtype = first.resting.dtype
        self.dtype = precision.compute_dtype(first)
        self.reduce_dtype = precision.reduce_dtype(first)
        self._channels = channels
        self._filled: tuple[Version, ...] | None = None  # what the buffer holds; None: nothing
        self._gathering: Pending | None = None
        self._publishing: Operation[None] | None = None
        self._held: tuple[Sequence[DedicatedParam], torch.Tensor | None] | None = None
        self._sent = False  # the last collective of the publish in flight has been issued
        with torch.inference_mode(False):  # a first forward in inference mode must not spoil training
            offsets, total = packed_offsets([p.piece_shape.numel() for p in params], self.dtype)
            self._buffer = torch.empty(total, dtype=self.dtype, device=self.layout.device)
            for param, view in zip(self.params, self._views(self._buffer, offsets), strict=True):
                # Through .data: a version counter of its own, which filling the buffer leaves alone. It wants
                # a gradient for now, so that a frozen one can take a hook; showing it sets what holds.
                piece = view.data if param.tp is None else param.tp.wrap(view.data)
                param.gathered = nn.Parameter(piece)
        self._offsets = offsets
        self._nbytes = self._buffer.untyped_storage().nbytes()
        self._is_master = self.layout.replicated and self.dtype == self.master_dtype
        self.release()

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism cuts these parameters: all of them or none, and into the same ranks."""
        return self.params[0].is_cut

    @property
    def in_owner_row(self) -> bool:
        """Whether this rank is the owner, or holds the owner's pieces."""
        return self.layout.is_owner(self.owner)

    @property
    def is_current(self) -> bool:
        """Whether the parameters are still what the bucket was packed for."""
        return all(
            param.resting.dtype == self.master_dtype and param.in_pieces == self.in_pieces
            for param in self.params
        )

    def _views(self, buffer: torch.Tensor, offsets: Sequence[int]) -> Iterator[torch.Tensor]:
        """One view of a packed buffer per parameter, in the shape of this rank's piece."""
        for param, offset in zip(self.params, offsets, strict=True):
            yield buffer[offset : offset + param.piece_shape.numel()].view(param.piece_shape)

    # Gather and release

    @property
    def _versions(self) -> tuple[Version, ...]:
        return tuple(param.version for param in self.params)

    @torch.no_grad()
    def gather(self) -> None:
        """Start to bring the owner's weights to every rank, unless the buffer holds them already."""
        if self._filled == self._versions:
            return
        self.wait_gathered()
        self._publish_if_never_done()
        self.wait_published()
        self._allocate()
        self._fill()
        self._mark_filled()
        self._gathering = self._channels.gather.broadcast(self._buffer, self.owner.shard, self.label)
        if self.layout.replicated:  # nobody need ever run the group, and so wait for it
            for param in self.params:
                param.before_read = self.wait_gathered

    def _allocate(self) -> None:
        if self._buffer.untyped_storage().nbytes() == 0:
            self._buffer.untyped_storage().resize_(self._nbytes)

    def _fill(self) -> None:
        """Copy the weights that this rank keeps to the buffer, unless they are there already."""
        if not self.layout.keeps_weight(self.owner):
            return
        views = self._views(self._buffer, self._offsets)
        apart = [
            (param, view)
            for param, view in zip(self.params, views, strict=True)
            if view.data_ptr() != param.resting_local.data_ptr()
        ]
        if not apart:
            return
        torch._foreach_copy_([view for _, view in apart], [param.resting_local for param, _ in apart])
        if self._is_master:
            for param, view in apart:
                param.rest_in(view)

    def _mark_filled(self) -> None:
        """Say that the buffer holds, or is about to hold, the weights as they are now."""
        self._filled = self._versions
        if self._is_master:
            for param in self.params:
                param.everywhere = param.version

    def release(self) -> None:
        """Free the gathered weights."""
        self.wait_gathered()
        self._buffer.untyped_storage().resize_(0)
        self._filled = None

    def wait_gathered(self) -> None:
        """Wait for the gather; the gathered parameters may be read afterwards."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            for param in self.params:
                param.before_read = None
            gathering.wait()
        if self.layout.replicated:
            self.wait_published()  # which brings the weights in place

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the gathered weights."""
        mine = self._buffer.untyped_storage()
        return mine.nbytes() > 0 and tensor.untyped_storage().data_ptr() == mine.data_ptr()

    # Reduce

    @torch.no_grad()
    def reduce(self, schedule: Schedule) -> Stages[HandOver]:
        """Average the gradients to the owner; yields each collective it has to wait for, one per stage.

        Stages: reduce along the row, reduce along the owner's column, and within the owner row: sum over the
        copies that tensor parallelism keeps, exchange.

        Returns what remains to be done at the end of backward: to add to the gradients of the resting
        parameters. Not before, so that a backward that raises leaves them as they were.
        """
        params = [param for param in self.params if param.resting.requires_grad]
        if not params:
            return lambda: None
        held = self._take_held(params)
        packed = PackedGradients(
            [_take_gradient(param) for param in params],
            [param.piece_shape for param in params],
            self.reduce_dtype,
            self.layout.device,
            schedule.divisor or self.layout.size,
        )
        buffer = packed.buffer
        if self._channels.side is not None:
            self._channels.side.keep(buffer)
        yield self._channels.reduce.reduce(buffer, self.owner.shard, self.label)
        if held is not None:
            buffer.add_(held)
        if not schedule.all_reduce and self.layout.replicate_size > 1:
            self._held = (params, buffer if self.layout.keeps_weight(self.owner) else None)
            return lambda: None
        if self.layout.keeps_weight(self.owner):
            yield self._channels.reduce_replicas.reduce(buffer, self.owner.replicate, self.label)
        if not self.in_owner_row:
            return partial(_hand_over, params, {}, [None] * len(params))  # and lets go of the buffer
        packed.average()
        yield self._sum_copies(buffer)
        counts = packed.counts
        whole = dict(zip(params, packed.views, strict=True))
        if self.is_cut and not self.in_pieces:
            exchange = self._exchange(params)
            wholes = yield from self._to_owners(exchange, packed.views, self.reduce_dtype)
            whole = dict(zip([param for param in params if param.is_owner], wholes, strict=True))
        if not all(packed.had):
            counts = counts.clone()  # they live as long as the gradients do: the buffer should not
        seen = [None if mine else count for mine, count in zip(packed.had, counts, strict=True)]
        return partial(_hand_over, params, whole, seen)

    def _sum_copies(self, buffer: torch.Tensor) -> Pending:
        tp = self.params[0].tp
        if tp is None or len(tp.copies) == 1:
            return Pending.nothing()
        return self._channels.sum_copies[tp.copies].all_reduce(buffer, self.label)

    def _take_held(self, params: Sequence[DedicatedParam]) -> torch.Tensor | None:
        """What earlier backwards have summed over this row, not over the replicas; where that is kept."""
        if self._held is None:
            return None
        (earlier, buffer), self._held = self._held, None
        if list(earlier) != list(params):
            names = ", ".join(sorted(param.param_name for param in set(earlier) ^ set(params)))
            raise RuntimeError(
                f"{names}: requires_grad has changed while gradients of earlier micro-batches are not reduced"
            )
        return buffer

    def drop_unreduced(self) -> None:
        """Forget gradients that have not been reduced over the replicas."""
        self._held = None

    # Exchange

    def _exchange(self, params: Sequence[DedicatedParam]) -> Exchange:
        cuts = [Cut.of(param.tp, param.tp_owner) for param in params if param.tp is not None]
        return Exchange(cuts, self._tp.position)

    @property
    def _tp(self) -> TensorParallel:
        assert self.params[0].tp is not None
        return self.params[0].tp

    def _to_owners(
        self, exchange: Exchange, pieces: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Stages[list[torch.Tensor]]:
        """One stage: pieces to the TP owners. Returns the whole matrices that this rank owns, new tensors."""
        scratch = self._channels.gather_scratch
        send = scratch.take(sum(exchange.piece_splits), dtype, self.layout.device)
        receive = scratch.take(sum(exchange.owned_splits), dtype, self.layout.device)
        exchange.pack_pieces(pieces, send)
        channel = self._channels.exchange[self._tp.ranks]
        yield channel.all_to_all(receive, send, exchange.owned_splits, exchange.piece_splits, self.label)
        wholes = exchange.unpack_owned(receive)
        scratch.give_back(send, receive)
        return wholes

    def _to_pieces(
        self,
        exchange: Exchange,
        wholes: Sequence[torch.Tensor],
        dtype: torch.dtype,
        use: Callable[[list[torch.Tensor]], None],
    ) -> Stages[None]:
        """One stage: the matrices that this rank owns, in pieces, to all. `use` gets those of this rank."""
        scratch = self._channels.scatter_scratch
        send = scratch.take(sum(exchange.owned_splits), dtype, self.layout.device)
        receive = scratch.take(sum(exchange.piece_splits), dtype, self.layout.device)
        exchange.pack_owned(wholes, send)
        channel = self._channels.publish_exchange[self._tp.ranks]
        yield channel.all_to_all(receive, send, exchange.piece_splits, exchange.owned_splits, self.label)
        use(exchange.unpack_pieces(receive))
        scratch.give_back(send, receive)

    # Publish

    @torch.no_grad()
    def publish(self, updates: Mapping[DedicatedParam, Update], *, exchange: bool = True) -> None:
        """Start to send updates from TP owners to pieces, and weights from the owner to its replicas.

        exchange: there may be updates to exchange; else the weights are what has changed.
        """
        if self.layout.replicated:
            self.wait_gathered()  # it writes to the same buffer, on another channel
        self.wait_published()
        for param in updates:
            param.published = param.version
        if self.layout.replicated:
            self._allocate()  # a step may come before the first forward
            self._mark_filled()
        self._sent = False
        self._publishing = self._channels.publishing.start(self._publish(updates, exchange))
        if not self._publishing.done:
            for param in updates:
                param.before_read = self.wait_published

    def _publish(self, updates: Mapping[DedicatedParam, Update], exchange: bool) -> Stages[None]:
        """Stages: Gram matrices, if any are made in this model; exchange within the owner row; broadcast to
        those who keep a copy."""
        params = [param for param in self.params if param in updates]
        if self.is_cut and exchange:
            if self._channels.has_gram_stage and not (self.in_pieces and self.in_owner_row):
                yield Pending.nothing()  # others have a stage here
            if not self.in_owner_row:
                yield Pending.nothing()
            elif self.in_pieces:
                yield from self._publish_in_pieces([(param, updates[param]) for param in params])
            else:
                yield from self._publish_whole([(param, updates[param]) for param in params])
        source = self.layout.publish_source(self.owner)
        if self.layout.replicated:
            self._allocate()  # a step may come before the first forward
            self._fill()
            broadcast = self._channels.publish.broadcast(self._buffer, source, self.label)
            self._sent = True
            yield broadcast
            return
        if self.layout.replicate_size == 1 or not self.layout.keeps_weight(self.owner):
            return
        offsets, total = packed_offsets([p.piece_shape.numel() for p in params], self.master_dtype)
        buffer = torch.zeros(total, dtype=self.master_dtype, device=self.layout.device)
        pieces = [buffer[o : o + p.piece_shape.numel()] for p, o in zip(params, offsets, strict=True)]
        locals_ = [param.resting_local.view(-1) for param in params]
        if self.in_owner_row:
            torch._foreach_copy_(pieces, locals_)
        yield self._channels.publish.broadcast(buffer, source, self.label)
        if not self.in_owner_row:
            torch._foreach_copy_(locals_, pieces)

    def _publish_whole(self, updates: Sequence[tuple[DedicatedParam, Update]]) -> Stages[None]:
        """One stage: updates from the TP owners to the pieces."""

        def use(pieces: list[torch.Tensor]) -> None:
            for (param, update), piece in zip(updates, pieces, strict=True):
                if update.apply is not None:
                    update.apply(param.resting_local, piece)

        exchange = self._exchange([param for param, _ in updates])
        wholes = [_or_zeros(update.orthogonal, param) for param, update in updates if param.is_owner]
        yield from self._to_pieces(exchange, wholes, self.master_dtype, use)

    def _publish_in_pieces(self, updates: Sequence[tuple[DedicatedParam, Update]]) -> Stages[None]:
        """Two stages: Gram matrices to the TP owners, factors back."""

        def use(factors: list[torch.Tensor]) -> None:
            for (param, update), factor in zip(updates, factors, strict=True):
                if update.gram is not None and update.apply is not None:
                    update.apply(param.resting_local, update.gram.orthogonal(factor.view(-1)))

        numels = [param.tp.gram_numel for param, _ in updates if param.tp is not None]
        exchange = Exchange(
            [
                Cut.one_each(self._tp.size, numel, param.tp_owner)
                for (param, _), numel in zip(updates, numels, strict=True)
            ],
            self._tp.position,
        )
        parts = [  # zeros where no rank had a gradient
            torch.zeros(numel, dtype=torch.float64, device=self.layout.device)
            if update.gram is None
            else update.gram.gram()
            for (_, update), numel in zip(updates, numels, strict=True)
        ]
        grams = yield from self._to_owners(exchange, parts, torch.float64)  # [TP size, gram_numel] each
        forms = [update.gram for param, update in updates if param.is_owner]
        factors = [
            gram if form is None else form.factor(gram.sum(0)).expand_as(gram)
            for form, gram in zip(forms, grams, strict=True)
        ]
        yield from self._to_pieces(exchange, factors, torch.float64, use)

    @torch.no_grad()
    def send(self) -> None:
        """Under DDP: issue all that a publish in flight still has to issue, waiting for what comes before.

        In the order of the publishes, on all ranks before any of them waits for a weight: what follows may
        differ between ranks, since without gathers they need not run the same modules.
        """
        while self._publishing is not None and not (self._sent or self._publishing.done):
            self._publishing.advance()

    @torch.no_grad()
    def wait_published(self) -> None:
        """Wait for a publish in flight, and for those before it."""
        if self._publishing is None:
            return
        publishing, self._publishing = self._publishing, None
        for param in self.params:
            param.before_read = None
        self._channels.publishing.finish(publishing)

    def _publish_if_never_done(self) -> None:
        """Make the replicas equal to the owner where something else than a step has changed the weights."""
        if self.layout.replicate_size == 1:
            return
        stale = {p: Update() for p in self.params if p.published != p.version}
        if stale:
            self._channels.publishing.finish()  # a channel belongs to one stage only within one step
            self.publish(stale, exchange=False)
            self.wait_published()


def _hand_over(
    params: Sequence[DedicatedParam],
    whole: Mapping[DedicatedParam, torch.Tensor],
    counts: Sequence[torch.Tensor | None],
) -> None:
    """Add averaged gradients to those of the resting parameters; `whole` has those that this rank owns."""
    for param, count in zip(params, counts, strict=True):
        param.add_gradient(whole.get(param), count)
    for param in params:
        # As FSDP2 does for its own; autograd does not know the resting parameter.
        for hook in (getattr(param.resting, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(param.resting)


def _take_gradient(param: DedicatedParam) -> torch.Tensor | None:
    """The gradient of the gathered parameter, as an addend of this rank's piece; the parameter loses it."""
    assert param.gathered is not None
    gradient, param.gathered.grad = param.gathered.grad, None
    if isinstance(gradient, DTensor):
        assert param.tp is not None
        return param.tp.addend(gradient)
    return gradient


def _or_zeros(whole: torch.Tensor | None, param: DedicatedParam) -> torch.Tensor:
    if whole is not None:
        return whole.to(param.resting.dtype)
    return torch.zeros(param.full_shape, dtype=param.resting.dtype, device=param.layout.device)
