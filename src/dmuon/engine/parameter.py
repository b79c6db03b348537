"""One dedicated parameter: at rest on its owner, gathered on every rank, and its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..structure import PLAIN, Structure
from .collectives import explained
from .exchange import shape_of, whole_at
from .layout import DataParallelLayout, Owner, local_slices, wrap_local
from .owned import OwnedTensor
from .tensor_parallel import Slices, TensorParallel

Version = tuple[int, int]
READ_RULE = "whole weights and state dicts are read on all ranks"


class DedicatedParam:
    """A weight that dmuon manages, and where its three forms are.

    - *At rest* `resting` is on the module: a parameter whose DTensor has all rows on the owner (and on the
      owner's replicas under HSDP and DDP) and no row elsewhere; under tensor parallelism, the owner row's
      ranks have their pieces. The optimizer, checkpoints and clipping see this one.
    - *Gathered* `gathered` is on the module, during forward and recomputation only: a plain parameter (a
      DTensor on the tensor-parallel mesh, if it came as one) that is a view of its group's buffer, or of the
      resting weight where every rank has it. It is the same object for ever, so that autograd graphs of
      several forwards meet in it.
    - *The gradient* is `resting.grad`, and no other: see `add_gradient`.

    Attributes:
        param_name: fully qualified name in the model.
        full_shape: shape of the whole tensor.
        structure: which matrices it holds.
        mesh: the mesh of its resting form: the data-parallel dims, then the tensor-parallel ones.
        tp: how tensor parallelism holds it; None for a plain parameter.
        tp_owner: position in the TP group of the rank that runs Newton-Schulz.
        compute_dtype: what the module computes with, where the weight at rest has another dtype; else None.
        has_team: the ranks that hold the pieces of a cut parameter orthogonalize it together, and each keeps
            a part of the gradient and the momentum, instead of the TP owner all of them.
        published: the version that all replicas have; None: none in common.
        agree: makes sure that all ranks have chosen the same parameters, on all ranks.
        settle: brings what steps have left to be published to everyone, on all ranks.
        reduce_due: reduces what is due to be reduced, on all ranks.
        has_plain_neighbours: the base parameters are plain tensors, equal on all ranks (torch's DDP).
        even_chunk: what torch has put aside for a load of the weight; None, as a rule (see `LocalRows`).
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        attribute: str,
        layout: DataParallelLayout,
        owner: Owner,
        tp: TensorParallel | None = None,
        tp_owner: int = 0,
        master_dtype: torch.dtype | None = None,
        structure: Structure = PLAIN,
    ) -> None:
        self.param_name = name
        self.module = module
        self.attribute = attribute
        self.layout = layout
        self.coordinate = owner
        self.tp = tp
        self.tp_owner = tp_owner
        self.structure = structure
        self.has_team = False
        self.gathered: nn.Parameter | None = None
        self.published: Version | None = None
        self.agree: Callable[[], None] = _nothing
        self.settle: Callable[[], None] = _nothing
        self.reduce_due: Callable[[], None] = _nothing
        self.model: Callable[[], nn.Module | None] = lambda: None  # a weak reference, like that below
        self.has_plain_neighbours = False
        self.even_chunk: torch.Tensor | None = None
        self._epoch = 0
        self._parts: dict[bool, tuple[Slices, ...]] = {}  # by `has_team`
        self._nowhere: dict[tuple[torch.dtype, bool], DTensor] = {}  # gradients of a rank that keeps none

        source = cast(nn.Parameter, module._parameters[attribute])
        self.full_shape = source.shape
        local = source.detach()
        if isinstance(local, DTensor):
            # Without a tensor-parallel cut, its pieces lie on the data-parallel ranks: bring them together.
            if tp is not None:
                local = local._local_tensor
            elif local.is_meta:
                local = torch.empty(self.full_shape, dtype=local.dtype, device="meta")
            else:
                local = local.full_tensor()
        self.compute_dtype = None if master_dtype in (None, local.dtype) else local.dtype
        # A rank that does not keep the weight lets go of it here; the keeper takes it over without a copy.
        local = local.contiguous() if self.keeps_weight else local.new_empty((0, *local.shape[1:]))
        local = local.to(master_dtype or local.dtype)
        if not local.is_meta:
            local = local.to(layout.device)
        self.mesh = layout.mesh if tp is None else layout.with_tp(tp.mesh)
        weight = wrap_local(local, self.full_shape, self.mesh, self.weight_placements)
        # A weak reference, so that a tensor does not keep the engine alive.
        self._reference = weakref.ref(self)
        self.resting = nn.Parameter(OwnedTensor.of(weight, self._reference), source.requires_grad)
        module._parameters[attribute] = self.resting
        self.refresh()

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.full_shape))
        return f"DedicatedParam({self.param_name}, {shape}, owner={self.owner}, rank={self.owner_rank})"

    # Who keeps it

    @property
    def owner(self) -> int | tuple[int, int]:
        """Coordinate of the owner: an int, or `(shard, replicate)` under HSDP."""
        if self.layout.given.ndim == 1:
            return self.layout.slot_of(self.coordinate)
        return (self.coordinate.shard, self.coordinate.replicate)

    @property
    def owner_rank(self) -> int:
        """Global rank of the owner; of the TP owner, where tensor parallelism cuts the parameter.

        Where it does not, every tensor-parallel rank has an owner of its own; this rank's is meant.
        """
        owner = self.layout.global_rank(self.coordinate)
        if not self.is_cut:
            return owner
        assert self.tp is not None
        grid, dims = self.mesh.mesh, self.layout.mesh.ndim
        where = (grid == owner).nonzero()[0].tolist()
        mine = (grid == self.tp.ranks[self.tp_owner]).nonzero()[0].tolist()
        return int(grid[tuple(where[:dims] + mine[dims:])])

    @property
    def in_owner_row(self) -> bool:
        """Whether this rank is the owner, or holds one of the owner's pieces."""
        return self.layout.is_owner(self.coordinate)

    @property
    def is_tp_owner(self) -> bool:
        """Whether this rank is the one of its TP group that would run Newton-Schulz for the parameter."""
        return self.tp is None or self.tp.position == self.tp_owner

    @property
    def is_owner(self) -> bool:
        """Whether this rank keeps the momentum and the gradient and runs Newton-Schulz."""
        return self.in_owner_row and self.is_tp_owner

    @property
    def keeps_state(self) -> bool:
        """Whether this rank keeps the gradient and the momentum, or its parts of them."""
        return self.in_owner_row if self.has_team else self.is_owner

    @property
    def state_shape(self) -> torch.Size:
        """Shape of the gradient and the momentum where they are kept: the whole matrix, or a part."""
        return shape_of(self.part) if self.has_team else self.full_shape

    @property
    def parts(self) -> tuple[Slices, ...]:
        """Of a cut parameter: which part of the gradient and the momentum each position keeps."""
        assert self.tp is not None
        if self.has_team not in self._parts:
            whole = whole_at(self.tp_owner, self.tp.size, self.full_shape)
            self._parts[self.has_team] = self.tp.team_parts if self.has_team else whole
        return self._parts[self.has_team]

    @property
    def part(self) -> Slices:
        """This rank's among `parts`."""
        assert self.tp is not None
        return self.parts[self.tp.position]

    @property
    def is_exchanged(self) -> bool:
        """Whether gradient and update have to travel between the pieces and what is kept."""
        return self.tp is not None and self.is_cut and self.parts != self.tp.pieces

    @property
    def keeps_weight(self) -> bool:
        """Whether this rank keeps the weight, or a piece, at rest (the owner row and its replicas)."""
        return self.layout.keeps_weight(self.coordinate)

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism has cut it into pieces."""
        return self.tp is not None and self.tp.size > 1

    @property
    def is_published(self) -> bool:
        """Whether a step's update has to travel: to replicas, or to pieces."""
        return self.layout.replicate_size > 1 or self.is_cut

    @property
    def shard_dim(self) -> int | None:
        """The tensor dim that tensor parallelism cuts; None if it cuts none."""
        return self.tp.shard_dim if self.tp is not None else None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold the pieces; None if it is not cut, or by several dims."""
        return self.tp.group if self.tp is not None and self.is_cut else None

    @property
    def piece_shape(self) -> torch.Size:
        """Shape of what this rank's module computes with: a piece, or all of it."""
        return self.tp.piece_shape if self.tp is not None else self.full_shape

    @property
    def _orig_size(self) -> torch.Size:
        return self.piece_shape

    # The weight

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the resting weight: `piece_shape` where it is kept, else no rows.

        Writing to it in place changes the weight; call `mark_updated` afterwards, on all ranks.
        """
        self.settle()
        return self.resting_local

    @property
    def resting_local(self) -> torch.Tensor:
        """As `local`, without waiting: for the publish itself."""
        return cast(DTensor, self.resting)._local_tensor

    @property
    def version(self) -> Version:
        """Raised by every change of the weight: a step, a load, or an in-place operation of torch's.

        Equal on all ranks, as long as what changes the weight runs on all ranks.
        """
        return self._epoch, self.resting._version

    def mark_updated(self) -> None:
        """Say that the weight has changed through `local`, or is about to: what was gathered is old."""
        self._epoch += 1

    @property
    def even_shape(self) -> torch.Size:
        """Shape of this rank's part if the weight were cut evenly, as its placements say."""
        slices = local_slices(self.full_shape, self.mesh, self.weight_placements)
        return torch.Size(part.stop - part.start for part in slices)

    def take_even_chunks(self) -> DTensor | None:
        """The weight that ranks have put aside in even chunks; None if none has. Collective over all ranks.

        Raises:
            RuntimeError: if only some have.
        """
        chunk, self.even_chunk = self.even_chunk, None
        flags = torch.tensor([chunk is not None, chunk is None], dtype=torch.int32, device=self.layout.device)
        for group in self.mesh.get_all_groups():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        found, lacking = flags.tolist()
        if not found:
            return None
        if lacking or chunk is None:
            raise RuntimeError(f"some ranks have been given {self.param_name} to load, others have not")
        return wrap_local(chunk, self.full_shape, self.mesh, self.weight_placements)

    def check_written(self) -> None:
        """Refuse to go on with even chunks that were put aside and never loaded; no collective.

        Raises:
            RuntimeError: on every rank, but where every rank keeps the whole and it has been written.
        """
        if self.even_chunk is None:
            return
        self.even_chunk = None
        if self.layout.shard_size > 1 or self.is_cut:
            raise RuntimeError(
                f"a chunk of {self.param_name} as FSDP2 would cut it was copied into to_local(), but it is "
                "whole on its owner, so nothing was written. Write to it inside dmuon.as_sharded(model)."
            )

    def materialize(self) -> None:
        """Give a weight on the meta device memory, as `module.to_empty` would."""
        empty = torch.empty_like(self.resting, device=self.layout.device)
        torch.utils.swap_tensors(self.resting, nn.Parameter(empty, self.resting.requires_grad))
        self.refresh()

    def refresh(self) -> None:
        """Check that the module still holds our parameter; renew what `to_empty` and the like drop from it.

        Raises:
            RuntimeError: if somebody has put another parameter in its place.
        """
        on_module = self.module._parameters.get(self.attribute)
        shown = on_module is self.resting or (on_module is self.gathered and on_module is not None)
        if shown and "view_as" in self.resting.__dict__:
            return
        if not shown:
            raise RuntimeError(
                f"{self.param_name} is a dedicated parameter, but another parameter has been put in its "
                "place. Call fully_shard between dmuon.dedicate_params and dmuon.Muon, load state_dicts "
                "without assign=True, and replace weights in place (under torch.no_grad())."
            )
        self._epoch += 1  # what has dropped the attribute has replaced the weight
        # Zero-bubble pipelining looks for a parameter's gradient by a view of it, where torch would fail on
        # some ranks, and on others find nothing. An attribute on this one object.
        self.resting.view_as = partial(_refuse_view, self.param_name)  # type: ignore[method-assign]

    @torch.no_grad()
    def piece(self) -> torch.Tensor:
        """This rank's piece of the owner's weight, a new tensor. Collective over the rows, and over the
        replicas where something else than a step has changed the weight.

        shape: `piece_shape`, dtype: that of the resting weight.
        """
        self.refresh()
        self.agree()
        self.settle()
        with explained(f"the broadcast of {self.param_name}, whole, to all ranks", READ_RULE):
            if self.published != self.version:
                if self.keeps_weight:
                    self.layout.broadcast_down(self.resting_local, self.coordinate)
                self.published = self.version
            if self.keeps_weight:
                piece = self.resting_local.clone()
            else:
                piece = torch.empty(self.piece_shape, dtype=self.resting.dtype, device=self.layout.device)
            self.layout.broadcast_along(piece, self.coordinate)
        return piece

    def full_tensor(self) -> torch.Tensor:
        """The owner's whole weight, on every rank (a new tensor); collective over all its ranks.

        Its gradient goes to the owner, which takes it from its own copy: like that of a DTensor's
        `full_tensor`, it is to be the same on all ranks.

        shape: `full_shape`, dtype: that of the resting weight.
        """
        return self.whole_of(cast(OwnedTensor, self.resting))

    def whole_of(self, tensor: OwnedTensor) -> torch.Tensor:
        """As `full_tensor`, of any tensor that lies as the weight or its gradient does."""
        return _Whole.apply(tensor, self)

    @torch.no_grad()
    def spread(self, tensor: OwnedTensor) -> torch.Tensor:
        """A tensor, on every rank: this rank's piece of what lies as the weight does (`piece_shape`), or what
        the owner keeps (`state_shape`). Collective."""
        local = tensor._local_tensor
        if tensor is self.resting:
            return self.piece()
        if tensor.placements != self.weight_placements:
            return self.spread_state(local, self.state_shape)
        self.settle()
        result = torch.empty(self.piece_shape, dtype=tensor.dtype, device=self.layout.device)
        if self.keeps_weight:
            result.copy_(local)
        with self._explained_spread():
            self.layout.broadcast_along(result, self.coordinate)
        return result

    def spread_state(self, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """What the owner keeps, or a team's rank, on every rank. Collective.

        local: of that shape where `keeps_state`.
        """
        result = torch.empty(shape, dtype=local.dtype, device=self.layout.device)
        if self.keeps_state:
            result.copy_(local)
        with self._explained_spread():
            if self.in_owner_row and self.tp is not None and self.is_cut and not self.has_team:
                self.tp.broadcast_from(result, self.tp_owner)
            if self.keeps_weight:
                self.layout.broadcast_down(result, self.coordinate)
            self.layout.broadcast_along(result, self.coordinate)
        return result

    def _explained_spread(self) -> AbstractContextManager[None]:
        return explained(f"the broadcast of a tensor of {self.param_name} to all ranks", READ_RULE)

    def to_owner(self, tensor: OwnedTensor) -> OwnedTensor:
        """What lies as the weight does, where the gradient lies. If cut, collective in the owner row."""
        mine = self._state_of_piece(tensor._local_tensor) if self.in_owner_row else None
        return self.wrap_owned(mine if self.keeps_state else None, tensor.dtype)

    def _state_of_piece(self, piece: torch.Tensor) -> torch.Tensor:
        """What this rank keeps (all of it, where it keeps nothing), from the pieces of the owner row, all of
        whose ranks call this."""
        if self.tp is None or not self.is_exchanged:
            return piece
        whole = self.tp.wrap(piece).full_tensor()
        return whole[self.part].clone() if self.has_team else whole

    def piece_of_state(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's piece, from the whole or, collective in the TP group, from a team's parts."""
        if self.tp is None:
            return state
        if self.has_team and not self.is_exchanged:
            return state
        whole = self.tp.wrap(state, self.tp.team_placements).full_tensor() if self.has_team else state
        return whole[self.tp.pieces[self.tp.position]]

    def from_whole(self, whole: torch.Tensor, placements: tuple[Placement, ...]) -> DTensor:
        """What every rank has whole, as it lies with those who keep it."""
        at_owner = placements == self.owner_placements and placements != self.weight_placements
        kept = self.keeps_state if at_owner else self.keeps_weight
        if self.tp is not None and not at_owner:
            whole = whole[self.tp.pieces[self.tp.position]]
        elif self.has_team:
            whole = whole[self.part]
        local = whole.contiguous() if kept else whole.new_empty((0, *whole.shape[1:]))
        return wrap_local(local, self.full_shape, self.mesh, placements)

    def show_gathered(self) -> None:
        """Put the gathered parameter on the module."""
        assert self.gathered is not None
        if self.gathered.requires_grad != self.resting.requires_grad:
            self.gathered.requires_grad_(self.resting.requires_grad)
        self.module._parameters[self.attribute] = self.gathered

    def show_resting(self) -> None:
        """Put the resting parameter on the module."""
        self.module._parameters[self.attribute] = self.resting

    # The gradient

    @property
    def weight_placements(self) -> tuple[Placement, ...]:
        """Placements on `mesh` of the resting weight."""
        return self.layout.weight_placements() + (self.tp.placements if self.tp is not None else ())

    def fsdp_placements(self) -> tuple[Placement, ...]:
        """The placements on `mesh` that plain FSDP2 would have given it."""
        tp = self.tp
        if tp is None:
            return self.layout.weight_placements()
        # FSDP2 cuts the rows of what is left here, which interleaves with a cut of the rows by others.
        pieces = prod(tp.mesh.shape[dim] for dim in tp.cutting if tp.placements[dim].is_shard(0))
        rows = Shard(0) if pieces == 1 else _StridedShard(0, split_factor=pieces)
        return (*self.layout.weight_placements()[:-1], rows, *tp.placements)

    def wrap_owned(self, local: torch.Tensor | None, dtype: torch.dtype) -> OwnedTensor:
        """What lives with the one owner, as a DTensor: gradient and momentum.

        Args:
            local: `state_shape` where `keeps_state`; None elsewhere.
            dtype: of the result.
        """
        if local is None:
            local = torch.empty((0, *self.state_shape[1:]), dtype=dtype, device=self.layout.device)
        tensor = wrap_local(local.to(dtype), self.full_shape, self.mesh, self.owner_placements)
        return OwnedTensor.of(tensor, self._reference)

    @torch.no_grad()
    def add_gradient(self, local: torch.Tensor | None, count: torch.Tensor | None) -> None:
        """Set `resting.grad`, or add to it, on all ranks.

        Args:
            local: the averaged gradient, `state_shape`, where `keeps_state`; None elsewhere.
            count: in the owner row, one element: the number of ranks that had a gradient; None if it is known
                not to be 0.
        """
        dtype = self.resting.dtype
        if self.resting.grad is None:
            if local is None:  # nothing to see in it: one serves every step
                gradient = self._nowhere.get((dtype, self.has_team))
                if gradient is None:
                    gradient = self._nowhere[dtype, self.has_team] = self.wrap_owned(None, dtype)
            else:
                gradient = self.wrap_owned(local, dtype)
            self.resting.grad = gradient
        else:
            known = self.gradient_count
            count = None if known is None or count is None else known + count
            self._keep_gradient_as_ours()
            if local is not None:  # on the local parts, without what DTensor does for an operation
                local_part(self.resting.grad).add_(local.to(dtype))
        # The count lives and dies with the gradient itself: whoever replaces or drops it drops that as well.
        self.resting.grad._dmuon_count = count  # type: ignore[attr-defined]

    def _keep_gradient_as_ours(self) -> None:
        """Replace a gradient that lies as the weight does (`zeros_like` of it): torch adds chunks."""
        self._adopt_gradient()
        gradient = self.resting.grad
        assert isinstance(gradient, DTensor)
        if gradient.placements != self.owner_placements:
            self.check_gradient()
            mine = self.local_gradient() if self.in_owner_row else None
            self.resting.grad = self.wrap_owned(mine if self.keeps_state else None, gradient.dtype)

    def _adopt_gradient(self) -> None:
        """Take over a gradient that torch has whole on every rank, such as that of `weight.mean()`."""
        gradient = self.resting.grad
        if isinstance(gradient, OwnedTensor) or not isinstance(gradient, DTensor):
            return
        if all(p.is_replicate() or p.is_partial() for p in gradient.placements):
            whole = gradient.redistribute(placements=[Replicate()] * self.mesh.ndim)._local_tensor
            mine = self.from_whole(whole, self.owner_placements)
            self.resting.grad = OwnedTensor.of(mine, self._reference)

    def check_team(self, has_team: bool) -> None:
        """Refuse a momentum that lies otherwise than it should now; alike on all ranks.

        has_team: whether there was one when the momentum was made.

        Raises:
            RuntimeError: if another optimizer has changed where it is kept.
        """
        if has_team != self.has_team:
            raise RuntimeError(
                f"{self.param_name}: another Muon has been built on this model with another "
                "tp_distributed_gram, so that this one's momentum lies where it can no longer be used. Take "
                "this optimizer's state_dict before, and load it into the new one."
            )

    def check_gradient(self) -> None:
        """Refuse a gradient that lies otherwise than the weight or a gradient of ours; no collective.

        Raises:
            RuntimeError: on every rank whose part does not fit.
        """
        self._adopt_gradient()
        gradient = self.resting.grad
        local = gradient._local_tensor if isinstance(gradient, DTensor) else None
        fits = (self.state_shape, self.piece_shape) if self.keeps_state or self.keeps_weight else ()
        may_be_empty = not self.keeps_state or self.state_shape.numel() == 0
        if local is None or not (local.shape in fits or (may_be_empty and local.numel() == 0)):
            raise RuntimeError(
                f"{self.param_name}: its gradient has been replaced by one that lies elsewhere than on the "
                "owner of the matrix. Change gradients in place or element by element (grad.mul_(2), "
                "2 * grad, torch.zeros_like(param)); do not distribute or redistribute them."
            )

    @property
    def gradient_count(self) -> torch.Tensor | None:
        """In the owner row, of a gradient: one element, the number of ranks that had one.

        None if it is known not to be 0, because this rank itself had one in some backward.
        """
        return getattr(self.resting.grad, "_dmuon_count", None)

    @property
    def owner_placements(self) -> tuple[Placement, ...]:
        """Placements on `mesh` of what lives with the one owner."""
        if self.tp is None:
            return self.layout.owner_placements()
        kept = self.tp.team_placements if self.has_team else self.tp.owner_placements
        return self.layout.owner_placements() + kept

    def local_gradient(self) -> torch.Tensor:
        """The gradient, `state_shape`, where `keeps_state`; no rows elsewhere. All of the owner row calls it.

        One that somebody else has set (such as `zeros_like` of the parameter, as
        `get_optimizer_state_dict` does) may lie there in pieces, which are brought together.
        """
        gradient = self.resting.grad
        assert isinstance(gradient, DTensor)
        local = gradient._local_tensor
        return local if gradient.placements == self.owner_placements else self._state_of_piece(local)


def _refuse_view(name: str, other: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        f"{name} is a dedicated parameter, whole on its owner, and has no view. Zero-bubble schedules of "
        "torch.distributed.pipelining (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, "
        "ScheduleDualPipeV) ask for one: use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B."
    )


def _nothing() -> None:
    """For a parameter whose engine has not started."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor, without autograd; any other tensor's data."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def record_of(tensor: torch.Tensor) -> DedicatedParam | None:
    """The dedicated parameter, of whatever model, whose resting parameter `tensor` is."""
    param = tensor.record() if isinstance(tensor, OwnedTensor) else None
    return param if param is not None and param.resting is tensor else None


def reduce_what_is_due(tensors: Iterable[torch.Tensor]) -> None:
    """Reduce the gradients of dedicated parameters among `tensors` that are due; on all ranks."""
    records = filter(None, map(record_of, tensors))
    for reduce_due in dict.fromkeys(record.reduce_due for record in records):  # once for each model
        reduce_due()


class _Whole(torch.autograd.Function):
    """The whole, as a function of what lies with the owner."""

    @staticmethod
    def forward(ctx: Any, tensor: OwnedTensor, param: DedicatedParam) -> torch.Tensor:
        ctx.param, ctx.placements, ctx.dtype = param, tensor.placements, tensor.dtype
        spread = param.spread(tensor)
        if param.tp is None:
            return spread
        if tensor.placements == param.weight_placements:
            return param.tp.wrap(spread).full_tensor()
        return param.tp.wrap(spread, param.tp.team_placements).full_tensor() if param.has_team else spread

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """gradient: `full_shape`, the same on all ranks."""
        param: DedicatedParam = ctx.param
        if param.resting.grad is not None:
            param._keep_gradient_as_ours()
            param.resting.grad._dmuon_count = None  # type: ignore[attr-defined]  # there is one now
        own = param.from_whole(gradient.to(ctx.dtype), param.owner_placements)
        return OwnedTensor.of(own, param._reference), None
