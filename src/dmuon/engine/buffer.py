"""The weights of a group in one flat buffer, and what the queues do with it.

The owners' parts lie behind each other, so that each phase is one launch whoever owns what. Every method that
communicates is straight-line code for a `Queue`: read from top to bottom, it is the life of a weight or of a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..scratch import Scratch
from .collectives import Communication, TeamPeers
from .exchange import Cut, Exchange
from .fsdp import Schedule
from .packing import Packing
from .parameter import DedicatedParam
from .tensor_parallel import Slices, TensorParallel


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

    def of(self, param: DedicatedParam) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of a weight at rest, in forward and backward, and of its gradient on the way."""
        return param.resting.dtype, self.compute_dtype(param), self.reduce_dtype(param)


class Team(Protocol):
    """How ranks orthogonalize matrices together; see `dmuon.optim.team`."""

    def orthogonalize(
        self,
        parts: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        peers: TeamPeers,
        cuts: Sequence[tuple[Slices, ...]] | None = None,
    ) -> list[torch.Tensor]:
        """This rank's parts of the orthogonalized matrices, whose whole shapes are given."""


Apply = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], None]


@dataclass
class Update:
    """What a step does to one weight: the same on every rank that keeps it, whenever it arrives there.

    Attributes:
        apply: `apply(weight, orthogonal, live)` updates a weight, or corresponding pieces, in place. `live`:
            one element, 0 where no rank had a gradient and the weight is to stay; None: it is not 0.
        dtype: in which the update travels: that of Newton-Schulz.
        orthogonal: what this rank has of the orthogonalized matrix: the whole or, on the ranks of a team, a
            part; None elsewhere, and once it is sent.
        live: in the owner row, as for `apply`.
        team: how it is orthogonalized in the publish; None: it has been.
        part: on the ranks of a team, this rank's part of what it is to orthogonalize.
    """

    apply: Apply
    dtype: torch.dtype
    orthogonal: torch.Tensor | None = None
    live: torch.Tensor | None = None
    team: Team | None = None
    part: torch.Tensor | None = None


Updates = Mapping[DedicatedParam, Update]
Gradient = tuple[DedicatedParam, "torch.Tensor | None", "torch.Tensor | None"]  # the mean, and the count


class Buffer:
    """The weights of one group that have the same dtypes: gathered into, reduced from.

    The buffer's storage is resized to nothing and back, and never replaced: what autograd saved of the
    gathered parameters are views of it, and they are valid again as soon as it is filled again. Where every
    rank has every weight in the dtype the model computes with (rows of one rank), there is no buffer: the
    gathered parameters are the resting weights themselves.

    Under tensor parallelism every rank's buffer holds its own pieces.
    """

    def __init__(
        self,
        params: Sequence[DedicatedParam],
        communication: Communication,
        precision: Precision,
        label: str,
        scratch: tuple[Scratch, Scratch],
    ) -> None:
        self.params = tuple(sorted(params, key=_key))  # as they lie in the buffer; stable
        self.layout = self.params[0].layout
        self.label = label
        self.master_dtype, self.dtype, self.reduce_dtype = precision.of(self.params[0])
        self.is_resting = self.layout.shard_size == 1 and self.dtype == self.master_dtype
        self.kept = [param for param in self.params if param.keeps_weight]
        self._communication = communication
        self._to_owners_scratch, self._to_pieces_scratch = scratch
        self._accumulated: dict[DedicatedParam, torch.Tensor] = {}  # in the reduce dtype
        self._held: tuple[list[DedicatedParam], torch.Tensor] | None = None
        self._packings: dict[tuple[bool, ...], Packing] = {}
        self._exchanges: dict[tuple[tuple[DedicatedParam, bool], ...], Exchange] = {}
        packing = Packing(
            [_key(param) for param in self.params], [p.piece_shape.numel() for p in self.params], self.dtype
        )
        with torch.inference_mode(False):  # a first forward in inference mode must not spoil training
            total = 0 if self.is_resting else packing.total
            self._buffer = torch.empty(total, dtype=self.dtype, device=self.layout.device)
            if self.is_resting:
                views = [param.resting_local for param in self.params]
            else:
                views = packing.views(self._buffer, [param.piece_shape for param in self.params])
            for param, view in zip(self.params, views, strict=True):
                # Through .data: a version counter of its own, which filling the buffer leaves alone.
                piece = view.data if param.tp is None else param.tp.wrap(view.data)
                param.gathered = nn.Parameter(piece)
        kept = zip(self.params, views, strict=True)
        self._kept_views = [view for param, view in kept if param.keeps_weight]
        self._parts = [(shard, self._buffer[part]) for shard, part in packing.parts()]
        self._nbytes = self._buffer.untyped_storage().nbytes()
        self.free()

    # Weights

    def allocate(self) -> None:
        """Have memory for the gathered weights, on the stream of the computation."""
        if self.is_resting:
            for param in self.params:  # `to_empty` and the like give a weight other storage
                mine = local_of(param.gathered)
                if mine.data_ptr() != param.resting_local.data_ptr():
                    _set_local(param.gathered, param.resting_local)
        elif self._buffer.untyped_storage().nbytes() == 0:
            self._buffer.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        """Give the memory of the gathered weights back."""
        self._buffer.untyped_storage().resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the gathered weights, which `free` would empty."""
        mine = self._buffer.untyped_storage()
        return mine.nbytes() > 0 and tensor.untyped_storage().data_ptr() == mine.data_ptr()

    def gather(self) -> None:
        """For the weights queue: the owners' weights, in the compute dtype, to all of the row."""
        if self.kept:
            torch._foreach_copy_(self._kept_views, [param.resting_local for param in self.kept])
        if self.layout.shard_size > 1:
            self._communication.broadcast("gather", self.label, self.layout.row, self._parts)

    # Gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """This rank's gradients of the trainable parameters, as addends; the parameters lose them."""
        return [self._take(param) for param in self.params if param.resting.requires_grad]

    def accumulate(self) -> None:
        """Keep this rank's gradients for a later reduction, summed in the dtype of the reduction.

        As FSDP2 does: in bfloat16, 256 and 1 would be 256.
        """
        if self.reduce_dtype == self.dtype:
            return  # autograd adds them up where they are
        for param in self.params:
            if param.resting.requires_grad and (total := self._take(param)) is not None:
                self._accumulated[param] = total.to(self.reduce_dtype)

    def _take(self, param: DedicatedParam) -> torch.Tensor | None:
        gathered = cast(nn.Parameter, param.gathered)
        gradient, gathered.grad = gathered.grad, None
        if isinstance(gradient, DTensor):
            assert param.tp is not None
            gradient = param.tp.addend(gradient)
        earlier = self._accumulated.pop(param, None)
        if earlier is None or gradient is None:
            return gradient if earlier is None else earlier
        return earlier.add_(gradient)

    def reduce(self, taken: Sequence[torch.Tensor | None], schedule: Schedule) -> list[Gradient]:
        """For the gradients queue: the mean over all data-parallel ranks, to the owner.

        taken: of `take_gradients`; zeros travel for what is None, and a count for each tells the two apart.

        Returns the gradients to add to those of the resting parameters (not here, so that a backward that
        raises leaves them as they were); nothing while the replicas are still to be summed.
        """
        params = [param for param in self.params if param.resting.requires_grad]
        if not params:
            return []
        layout, here, communication = self.layout, self.layout.here, self._communication
        packing, divisor = self._packing(params), schedule.divisor or layout.size
        buffer = self._pack(packing, params, taken)
        if self.reduce_dtype == torch.float16:  # a sum would overflow where a mean does not
            buffer.div_(divisor)

        if layout.shard_size > 1:
            parts = [(shard, buffer[part]) for shard, part in packing.parts()]
            communication.reduce("reduce", self.label, layout.row, parts)
            buffer = buffer[packing.span(here.shard)].clone()  # lets go of the others' parts
        if self._held is not None:
            buffer.add_(self._take_held(params))
        if layout.replicate_size > 1:
            if not schedule.all_reduce:
                self._held = params, buffer
                return []
            parts = [(replicate, buffer[part]) for replicate, part in packing.parts(here.shard)]
            if parts:
                communication.reduce("reduce_replicas", self.label, layout.column, parts)
            base = packing.span(here.shard).start
            mine = packing.span(here.shard, here.replicate)
            buffer = buffer[mine.start - base : mine.stop - base].clone()
        if self.reduce_dtype != torch.float16:
            buffer.div_(divisor)  # the counts as well, which only matter as zero or not
        for dims, part in packing.parts(here.shard, here.replicate):
            if dims:
                ranks = next(_copies(p) for p in params if _key(p) == (here.shard, here.replicate, dims))
                communication.all_reduce("sum_copies", self.label, ranks, buffer[part])
        return self._unpack(packing, params, taken, buffer)

    def _packing(self, params: Sequence[DedicatedParam]) -> Packing:
        """Of the trainable parameters; freezing one makes another."""
        which = tuple(param.resting.requires_grad for param in self.params)
        if which not in self._packings:
            keys, numels = [_key(p) for p in params], [p.piece_shape.numel() for p in params]
            self._packings[which] = Packing(keys, numels, self.reduce_dtype, counts=True)
        return self._packings[which]

    def _pack(
        self, packing: Packing, params: Sequence[DedicatedParam], taken: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        buffer = torch.empty(packing.total, dtype=self.reduce_dtype, device=self.layout.device)
        views = packing.views(buffer, [param.piece_shape for param in params])
        pairs = [
            (view, gradient) for view, gradient in zip(views, taken, strict=True) if gradient is not None
        ]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        for index, count in _runs(packing.counts):
            buffer[index : index + count].fill_(1)  # filled, not copied: no transfer from the host
        for view, index, gradient in zip(views, packing.counts, taken, strict=True):
            if gradient is None:
                view.zero_()
                buffer[index].zero_()
        return buffer

    def _unpack(
        self,
        packing: Packing,
        params: Sequence[DedicatedParam],
        taken: Sequence[torch.Tensor | None],
        buffer: torch.Tensor,
    ) -> list[Gradient]:
        """buffer: the span of what this rank's owner row owns."""
        base = packing.span(self.layout.here.shard, self.layout.here.replicate).start
        owned: list[DedicatedParam] = []
        views: list[torch.Tensor] = []
        counts: list[torch.Tensor | None] = []
        rows = zip(params, packing.offsets, packing.counts, taken, strict=True)
        for param, offset, count, gradient in rows:
            if param.in_owner_row:
                start = offset - base
                owned.append(param)
                views.append(buffer[start : start + param.piece_shape.numel()].view(param.piece_shape))
                # A copy: it lives as long as the gradient does, which the buffer need not.
                counts.append(None if gradient is not None else buffer[count - base].clone())
        wholes = self._exchange_gradients(owned, views)
        known = {param: (wholes.get(param), count) for param, count in zip(owned, counts, strict=True)}
        return [(param, *known.get(param, (None, None))) for param in params]

    def _take_held(self, params: list[DedicatedParam]) -> torch.Tensor:
        """What earlier backwards have summed over this row, not over the replicas."""
        assert self._held is not None
        (earlier, buffer), self._held = self._held, None
        if earlier != params:
            names = ", ".join(sorted(param.param_name for param in set(earlier) ^ set(params)))
            raise RuntimeError(
                f"{names}: requires_grad has changed while gradients of earlier micro-batches are not reduced"
            )
        return buffer

    def drop_unreduced(self) -> None:
        """Forget gradients that have not been reduced, or not over the replicas."""
        self._held = None
        self._accumulated.clear()
        for param in self.params:
            cast(nn.Parameter, param.gathered).grad = None

    # Exchange: pieces to those who keep gradients, and back

    def _exchange_gradients(
        self, owned: Sequence[DedicatedParam], views: Sequence[torch.Tensor]
    ) -> dict[DedicatedParam, torch.Tensor]:
        """The gradients that this rank keeps: of cut matrices, what TP owners and teams have of them."""
        result = {param: view for param, view in zip(owned, views, strict=True) if not param.is_exchanged}
        pieces = {param: view for param, view in zip(owned, views, strict=True) if param.is_exchanged}
        if pieces:  # copies, which do not keep the pieces beside them
            result = {param: view.clone() for param, view in result.items()}
        for tp, params in _by_tp_group(pieces):
            exchange, scratch = self._exchange_of(tp, params), self._to_owners_scratch
            send = scratch.take(sum(exchange.piece_splits), self.reduce_dtype, self.layout.device)
            receive = scratch.take(sum(exchange.part_splits), self.reduce_dtype, self.layout.device)
            exchange.pack_pieces([pieces[param] for param in params], send)
            self._communication.all_to_all(
                "exchange", self.label, tp.ranks, receive, send, exchange.part_splits, exchange.piece_splits
            )
            parts = zip(params, exchange.unpack_parts(receive), strict=True)
            result |= {param: part for param, part in parts if param.keeps_state}
            scratch.give_back(send, receive)
        return result

    def _exchange_of(self, tp: TensorParallel, params: Sequence[DedicatedParam]) -> Exchange:
        """The plan of an exchange, made once."""
        key = tuple((param, param.has_team) for param in params)
        if key not in self._exchanges:
            cuts = [Cut(p.full_shape, cast(TensorParallel, p.tp).pieces, p.parts) for p in params]
            self._exchanges[key] = Exchange(cuts, tp.position)
        return self._exchanges[key]

    # Publish

    def publish(self, updates: Updates) -> None:
        """For the weights queue: a step's updates to all who keep these weights, who apply them."""
        by_dtype: dict[torch.dtype, list[DedicatedParam]] = {}
        for param in self.kept:
            if param in updates:
                by_dtype.setdefault(updates[param].dtype, []).append(param)
        for dtype, params in by_dtype.items():
            mine = [param for param in params if param.in_owner_row]
            self._orthogonalize_by_teams(mine, updates)
            pieces: dict[DedicatedParam, torch.Tensor] = {}
            for tp, same in _by_tp_group([param for param in mine if param.is_exchanged]):
                pieces |= zip(same, self._publish_to_pieces(tp, same, updates, dtype), strict=True)
            for param in mine:
                if param not in pieces:
                    pieces[param] = cast(torch.Tensor, self._taken_from(updates[param]))
            live = {param: updates[param].live for param in mine}
            if self.layout.replicate_size > 1:
                pieces, live = self._publish_to_replicas(params, dtype, pieces, live)
            for param in params:
                updates[param].apply(param.resting_local, pieces.pop(param), live[param])

    def _orthogonalize_by_teams(self, params: Sequence[DedicatedParam], updates: Updates) -> None:
        """Newton-Schulz of what teams share: all matrices of one team and settings at a time."""
        by_settings: dict[Team, list[DedicatedParam]] = {}
        for param in params:
            if (team := updates[param].team) is not None:
                by_settings.setdefault(team, []).append(param)
        for team, alike in by_settings.items():
            for tp, same in _by_tp_group(alike):
                parts = [cast(torch.Tensor, updates[param].part) for param in same]
                self._communication.weights.let_go(*parts)
                for param in same:
                    updates[param].part = None
                peers = self._communication.team(self.label, tp.ranks)
                shapes, cuts = [param.full_shape for param in same], [param.parts for param in same]
                found = team.orthogonalize(parts, shapes, peers, cuts)
                for param, orthogonal in zip(same, found, strict=True):
                    update = updates[param]
                    update.orthogonal = orthogonal.to(update.dtype)
                    if update.live is not None:
                        update.orthogonal.mul_(update.live > 0)

    def _publish_to_pieces(
        self, tp: TensorParallel, params: Sequence[DedicatedParam], updates: Updates, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Updates from those who made them; this rank's pieces, new tensors."""
        exchange, scratch = self._exchange_of(tp, params), self._to_pieces_scratch
        send = scratch.take(sum(exchange.part_splits), dtype, self.layout.device)
        exchange.pack_parts([self._taken_from(updates[param]) for param in params], send)
        receive = scratch.take(sum(exchange.piece_splits), dtype, self.layout.device)
        splits = exchange.piece_splits, exchange.part_splits
        self._communication.all_to_all("publish_exchange", self.label, tp.ranks, receive, send, *splits)
        pieces = exchange.unpack_pieces(receive)
        scratch.give_back(send, receive)
        return pieces

    def _taken_from(self, update: Update) -> torch.Tensor | None:
        """What this rank has of the orthogonalized matrix; its memory can go once it has been read."""
        orthogonal, update.orthogonal = update.orthogonal, None
        self._communication.weights.let_go(orthogonal)
        return orthogonal

    def _publish_to_replicas(
        self,
        params: Sequence[DedicatedParam],
        dtype: torch.dtype,
        pieces: dict[DedicatedParam, torch.Tensor],
        live: dict[DedicatedParam, torch.Tensor | None],
    ) -> tuple[dict[DedicatedParam, torch.Tensor], dict[DedicatedParam, torch.Tensor | None]]:
        """The owner row's pieces along the columns; behind them, which of them are live."""
        keys = [(param.coordinate.replicate,) for param in params]
        packing = Packing(keys, [param.piece_shape.numel() for param in params], dtype, counts=True)
        buffer = torch.empty(packing.total, dtype=dtype, device=self.layout.device)
        views = packing.views(buffer, [param.piece_shape for param in params])
        rows = list(zip(params, views, packing.counts, strict=True))
        for param, view, index in rows:
            if param.in_owner_row:
                view.copy_(pieces.pop(param))
                flag = live[param]
                buffer[index].fill_(1) if flag is None else buffer[index].copy_(flag > 0)
        parts = [(replicate, buffer[part]) for replicate, part in packing.parts()]
        self._communication.broadcast("publish", self.label, self.layout.column, parts)
        flags: dict[DedicatedParam, torch.Tensor | None] = {}
        for param, _, index in rows:
            flags[param] = live[param] if param.in_owner_row else buffer[index]
        return {param: view for param, view, _ in rows}, flags

    def equalize(self, stale: Sequence[DedicatedParam]) -> None:
        """For the weights queue: whole weights to the replicas, where not a step has changed them."""
        params = [param for param in self.kept if param in stale]
        if not params:
            return
        keys = [(param.coordinate.replicate,) for param in params]
        packing = Packing(keys, [param.piece_shape.numel() for param in params], self.master_dtype)
        buffer = torch.empty(packing.total, dtype=self.master_dtype, device=self.layout.device)
        views = packing.views(buffer, [param.piece_shape for param in params])
        weights = [param.resting_local for param in params]
        torch._foreach_copy_(views, weights)
        parts = [(replicate, buffer[part]) for replicate, part in packing.parts()]
        self._communication.broadcast("publish", self.label, self.layout.column, parts)
        torch._foreach_copy_(weights, views)


def _key(param: DedicatedParam) -> tuple[int, int, tuple[str, ...]]:
    """Where a weight goes: its owner, and the mesh dims along which an owner row has copies of it.

    Not the ranks that have them, which would sort otherwise on other ranks of the row.
    """
    tp, dims = param.tp, tuple[str, ...]()
    if tp is not None and _copies(param):
        names = tp.mesh.mesh_dim_names or tuple(map(str, range(tp.mesh.ndim)))
        others = (d for d in range(tp.mesh.ndim) if d not in tp.cutting and tp.mesh.size(d) > 1)
        dims = tuple(names[d] for d in others)
    return param.coordinate.shard, param.coordinate.replicate, dims


def _copies(param: DedicatedParam) -> tuple[int, ...]:
    """The ranks of an owner row that have the same piece, if there are several."""
    return param.tp.copies if param.tp is not None and len(param.tp.copies) > 1 else ()


def _by_tp_group(
    params: Sequence[DedicatedParam] | Mapping[DedicatedParam, object],
) -> list[tuple[TensorParallel, list[DedicatedParam]]]:
    """The cut parameters of each TP group; in one order on all its ranks."""
    groups: dict[tuple[int, ...], tuple[TensorParallel, list[DedicatedParam]]] = {}
    for param in params:
        tp = cast(TensorParallel, param.tp)
        groups.setdefault(tp.ranks, (tp, []))[1].append(param)
    return list(groups.values())


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, length) of stretches without gaps."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs


def local_of(gathered: nn.Parameter | None) -> torch.Tensor:
    """What a gathered parameter reads on this rank."""
    assert gathered is not None
    return gathered._local_tensor if isinstance(gathered, DTensor) else gathered


def _set_local(gathered: nn.Parameter | None, local: torch.Tensor) -> None:
    """Let a gathered parameter read other storage; it stays the same object."""
    assert gathered is not None
    if isinstance(gathered, DTensor):
        gathered._local_tensor = local.data
    else:
        gathered.data = local.data
