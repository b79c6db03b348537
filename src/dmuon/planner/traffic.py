"""What every collective of a step moves, read off the engine's own `Packing` and `Exchange`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

from ..engine.exchange import Cut, Exchange, whole_at
from ..engine.packing import Key, Packing
from ..engine.tensor_parallel import Slices
from ..optim.team import team_elements_of
from ..ownership import chunks
from .mesh import Mesh

PHASES = (
    "gather",
    "reduce",
    "reduce_replicas",
    "publish",
    "exchange",
    "publish_exchange",
    "sum_copies",
    "team_reduce",
    "team_gather",
)
NOBODY = -1  # a coordinate: of a rank that keeps, or owns, nothing
Moves = dict[str, tuple[int, int]]  # by phase: collectives and bytes of one rank, as Traffic counts them


@dataclass(frozen=True)
class Dtypes:
    """
    Attributes:
        weight: of weights and gradients at rest.
        compute: of gathered weights.
        reduce: of gradients on their way.
        momentum: of the optimizer's buffer.
        newton_schulz: of its products, and of updates on their way.
    """

    weight: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    momentum: torch.dtype = torch.float32
    newton_schulz: torch.dtype = torch.float32


@dataclass(frozen=True)
class Share:
    """What bytes and memory depend on of one matrix, apart from its owner.

    Attributes:
        pieces: elements, by tensor-parallel rank; one entry if nothing cuts it.
        tp_owner: position of the rank that runs Newton-Schulz.
        copies: tensor-parallel ranks that hold the same DTensor; 1 for a plain or a cut one.
        team: of a matrix that has one, its shape and the dim that is cut; else None.
    """

    pieces: tuple[int, ...]
    tp_owner: int = 0
    copies: int = 1
    team: tuple[tuple[int, int], int] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether tensor parallelism has cut it."""
        return len(self.pieces) > 1

    def piece(self, tp: int) -> int:
        """Elements of the weight on a tensor-parallel rank."""
        return self.pieces[tp % len(self.pieces)]

    def state(self, tp: int) -> int:
        """Elements of the gradient and of the momentum on a tensor-parallel rank of the owner row."""
        if not self.is_cut:
            return self.piece(tp)
        if self.team is not None:
            shape, _ = self.team
            return chunks(max(shape), len(self.pieces))[tp] * min(shape)
        return sum(self.pieces) if tp == self.tp_owner else 0


class Group:
    """The dedicated matrices of one block, as the ranks at one tensor-parallel position have them.

    A rank is a coordinate (shard, replicate). All ranks of a row that keep nothing of the group move the
    same; so do all of a column that own nothing of it. `NOBODY` stands for these.

    Attributes:
        weights: where the gathered weights lie.
        gradients: where gradients lie that are reduced.
        owned: by coordinate of the owner.
        kept: elements of the weights that a rank keeps, by shard coordinate.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[int, Share]],
        mesh: Mesh,
        tp: int,
        dtypes: Dtypes,
        reshard: bool,
        ns_steps: int = 5,
    ) -> None:
        """matrices: each with its owner's slot, in module order."""
        self.mesh, self.tp, self.dtypes, self.reshard = mesh, tp, dtypes, reshard
        self._ns_steps = ns_steps
        placed = [((slot % mesh.shard, slot // mesh.shard), share) for slot, share in matrices]
        placed.sort(key=lambda entry: (entry[0], entry[1].copies))
        owners = tuple(owner for owner, _ in placed)
        keys = tuple((*owner, share.copies) for owner, share in placed)
        self._numels = tuple(share.piece(tp) for _, share in placed)
        self._owners = owners
        self.weights = _packing(owners, self._numels, dtypes.compute)
        self.gradients = _packing(keys, self._numels, dtypes.reduce, counts=True)
        self._updates = _packing(owners, self._numels, dtypes.newton_schulz, counts=True)
        self.owned: dict[Key, list[Share]] = {}
        self.kept: Counter[int] = Counter()
        for owner, share in placed:
            self.owned.setdefault(owner, []).append(share)
            self.kept[owner[0]] += share.piece(tp)

    def of_a_step(self, shard: int, replicate: int) -> Moves:
        """What a rank moves of the group in a forward, a backward and a `step()`."""
        moves: Moves = {}
        mesh, row, owner = self.mesh, (shard,), (shard, replicate)
        if mesh.shard > 1:
            gathers = 2 if self.reshard else 1
            moves["gather"] = gathers, gathers * _others(self.weights, (), row)
            moves["reduce"] = 1, _others(self.gradients, (), row)
        if mesh.replicate > 1 and shard in self.kept:
            moves["reduce_replicas"] = 1, _others(self.gradients, row, owner)
            moves["publish"] = 1, _others(self._updates, row, owner)
        for copies, part in self.gradients.parts(*owner):
            if copies > 1:
                nbytes = (part.stop - part.start) * self.dtypes.reduce.itemsize
                moves["sum_copies"] = 1, 2 * (copies - 1) * nbytes // copies
        cut = [share for share in self.owned.get(owner, ()) if share.is_cut]
        teams = [share.team[0] for share in cut if share.team is not None]
        if teams:
            steps, size, itemsize = self._ns_steps, mesh.tp, self.dtypes.newton_schulz.itemsize
            sent = [team_elements_of(self.tp, *shape, size, steps) for shape in teams]
            norms = 2 * 4 * (size - 1) * len(teams)
            moves["team_reduce"] = steps, sum(reduced for reduced, _ in sent) * itemsize
            moves["team_gather"] = 2 * steps + 1, sum(gathered for _, gathered in sent) * itemsize + norms
        cut = [share for share in cut if not _stays(share)]
        if cut:
            there, back = self._exchanged(cut)
            moves["exchange"] = 1, there * self.dtypes.reduce.itemsize
            moves["publish_exchange"] = 1, back * self.dtypes.newton_schulz.itemsize
        return moves

    def _exchanged(self, shares: Sequence[Share]) -> tuple[int, int]:
        """Elements that a rank sends: to the TP owners, and back."""
        each = [_exchanged(share, self.tp) for share in shares]
        return sum(there for there, _ in each), sum(back for _, back in each)

    def of_the_start(self, shard: int, replicate: int) -> Moves:
        """What a rank moves once, up to the first forward, on top: the owners' initial weights."""
        if self.mesh.replicate == 1 or shard not in self.kept:
            return {}
        weights = _packing(self._owners, self._numels, self.dtypes.weight)
        return {"publish": (1, _others(weights, (shard,), (shard, replicate)))}


def _others(packing: Packing, whole: Key, mine: Key) -> int:
    """Bytes of one span without another one inside it."""
    spans = packing.span(*whole), packing.span(*mine)
    sizes = [span.stop - span.start for span in spans]
    return (sizes[0] - sizes[1]) * packing.dtype.itemsize


@lru_cache(maxsize=8)  # most tensor-parallel ranks have the same
def _packing(
    keys: tuple[Key, ...], numels: tuple[int, ...], dtype: torch.dtype, *, counts: bool = False
) -> Packing:
    return Packing(keys, numels, dtype, counts=counts)


def _stays(share: Share) -> bool:
    """Whether the pieces of a cut matrix are the parts of its team."""
    if share.team is None:
        return False
    shape, dim = share.team
    return shape[dim] == max(shape)


@lru_cache(maxsize=4096)  # a model has few kinds of matrices
def _exchanged(share: Share, tp: int) -> tuple[int, int]:
    """Of one matrix. Nothing is padded, so that those of several matrices add up."""
    if share.team is None:
        shape = torch.Size([sum(share.pieces)])  # as if it were flat: only sizes matter here
        pieces = _runs(share.pieces, ())
        cut = Cut(shape, pieces, whole_at(share.tp_owner, len(pieces), shape))
    else:
        size, ((rows, cols), dim) = len(share.pieces), share.team
        by_rows, by_cols = _runs(chunks(rows, size), (), (cols,)), _runs(chunks(cols, size), (rows,))
        pieces, parts = (by_cols, by_rows) if dim else (by_rows, by_cols)  # the team cuts the other side
        cut = Cut(torch.Size((rows, cols)), pieces, parts)
    exchange = Exchange([cut], tp)
    there, back = exchange.piece_splits, exchange.part_splits
    return sum(there) - there[tp], sum(back) - back[tp]


def _runs(sizes: Sequence[int], before: tuple[int, ...], after: tuple[int, ...] = ()) -> tuple[Slices, ...]:
    """Pieces that follow each other along one dim, whole along those before and after it."""
    ends = accumulate(sizes)
    whole = tuple(slice(0, n) for n in before), tuple(slice(0, n) for n in after)
    return tuple((*whole[0], slice(end - n, end), *whole[1]) for n, end in zip(sizes, ends, strict=True))


def in_sum(*addends: Moves) -> Moves:
    """The sum of several."""
    total: Moves = {}
    for moves in addends:
        add(total, moves)
    return total


def add(total: Moves, moves: Moves) -> None:
    """Add what is in `moves`."""
    for phase, (calls, nbytes) in moves.items():
        before = total.get(phase, (0, 0))
        total[phase] = (before[0] + calls, before[1] + nbytes)
