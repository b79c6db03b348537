"""What every collective of a step moves, as formulas: those of docs/bytes-and-memory.md.

A rank moves of each buffer what its role says: it is the buffer's owner (or, under tensor parallelism, one of
the owner row), keeps a copy of the weights in another row of the HSDP grid, or neither. So a rank's traffic
is a sum over buffers, and that of all ranks takes no time proportional to ranks times buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

_ALIGNMENT = 16  # bytes: each matrix starts at a multiple
_GRAM = 8  # bytes of an element of a Gram matrix and of a factor: float64
BASE_BUCKET = 25 * 2**20  # bytes of base parameters in one bucket, under DDP

PHASES = (
    "gather",
    "reduce",
    "reduce_replicas",
    "publish",
    "exchange",
    "publish_exchange",
    "sum_copies",
    "base",
)
Moves = dict[str, tuple[int, int]]  # by phase: collectives and bytes of one rank, as Traffic counts them


class Role(Enum):
    """What a data-parallel coordinate is to a matrix."""

    OTHER = "other"
    KEEPER = "keeper"  # keeps the weight: another row's rank in the owner's column
    OWNER = "owner"


@dataclass(frozen=True)
class Dtypes:
    """Bytes of an element.

    Attributes:
        weight: at rest; also of updates and of gradients at rest.
        compute: of gathered weights.
        reduce: of gradients on their way.
        momentum: of the optimizer's buffer.
    """

    weight: int = 4
    compute: int = 4
    reduce: int = 4
    momentum: int = 4


@dataclass(frozen=True)
class Setting:
    """A mesh, and how it is used.

    Attributes:
        n: ranks that share the model, or under DDP that have it.
        r: rows of the HSDP grid.
        ddp: whether the model is whole on every data-parallel rank.
        reshard: weights are freed after forward, and gathered again for backward.
    """

    n: int
    r: int
    ddp: bool = False
    reshard: bool = True
    dtypes: Dtypes = Dtypes()


@dataclass(frozen=True)
class Share:
    """What the formulas need to know of one matrix, apart from its owner.

    Attributes:
        pieces: elements, by tensor-parallel rank; one entry if nothing cuts it.
        tp_owner: position of the rank that runs Newton-Schulz.
        copies: tensor-parallel ranks that hold the same DTensor; 1 for a plain or a cut one.
        gram: elements of a triangle of its Gram matrix where that travels in its place, else None.
    """

    pieces: tuple[int, ...]
    tp_owner: int = 0
    copies: int = 1
    gram: int | None = None

    def piece(self, tp: int) -> int:
        """Elements on a tensor-parallel rank."""
        return self.pieces[tp % len(self.pieces)]

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Matrices of one group, owner and kind travel together."""
        return len(self.pieces), self.copies, self.gram is None


Buffer = tuple[Share, ...]  # matrices that travel together


def padded(numels: Iterable[int], itemsize: int) -> int:
    """Bytes of a packed buffer."""
    return sum(-(-numel * itemsize // _ALIGNMENT) * _ALIGNMENT for numel in numels)


def of_a_step(buffer: Buffer, role: Role, tp: int, s: Setting) -> Moves:
    """What a forward, a backward and a `step()` move of a buffer."""
    moves: Moves = {}
    keeps, owns = role is not Role.OTHER, role is Role.OWNER
    numels = [share.piece(tp) for share in buffer]
    gradients = padded(numels, s.dtypes.reduce) + len(buffer) * s.dtypes.reduce  # an element each: a count
    if s.n > 1:
        weights = 0 if keeps else padded(numels, s.dtypes.compute)
        if s.ddp:
            moves["publish"] = (1, weights)
        else:
            gathers = 2 if s.reshard else 1
            moves["gather"] = (gathers, gathers * weights)
        moves["reduce"] = (1, 0 if keeps else gradients)
    if s.r > 1 and keeps:
        moves["reduce_replicas"] = (1, 0 if owns else gradients)
        moves["publish"] = (1, 0 if owns else padded(numels, s.dtypes.weight))
    copies = buffer[0].copies
    if owns and copies > 1:
        moves["sum_copies"] = (1, 2 * (copies - 1) * gradients // copies)
    if owns and len(buffer[0].pieces) > 1:
        moves.update(_exchanges(buffer, tp, s.dtypes))
    return moves


def _exchanges(buffer: Buffer, tp: int, dtypes: Dtypes) -> Moves:
    """Pieces to the TP owners, and back; or Gram matrices to the TP owners, and factors back."""
    mine = [share for share in buffer if share.tp_owner == tp]
    others = [share for share in buffer if share.tp_owner != tp]
    if buffer[0].gram is None:
        there = dtypes.reduce * sum(share.piece(tp) for share in others)
        back = dtypes.weight * sum(sum(share.pieces) - share.piece(tp) for share in mine)
    else:
        there = _GRAM * sum(share.gram or 0 for share in others)
        back = _GRAM * (len(buffer[0].pieces) - 1) * sum(share.gram or 0 for share in mine)
    return {"exchange": (1, there), "publish_exchange": (1, back)}


def of_the_start(buffer: Buffer, role: Role, tp: int, s: Setting) -> Moves:
    """What is moved of a buffer once, up to the first forward, on top: the owner's initial weights."""
    numels = [share.piece(tp) for share in buffer]
    if s.ddp:
        return (
            {"gather": (1, 0 if role is Role.OWNER else padded(numels, s.dtypes.compute))} if s.n > 1 else {}
        )
    if s.r > 1 and role is not Role.OTHER:
        return {"publish": (1, 0 if role is Role.OWNER else padded(numels, s.dtypes.weight))}
    return {}


def of_base(numels: Sequence[int], s: Setting) -> Moves:
    """What `dmuon.replicate` moves in a step. numels: of this rank's trainable base parameters, in module
    order."""
    if s.n == 1 or not s.ddp:
        return {}
    size = s.dtypes.weight
    buckets = _bucketed([numel * size for numel in reversed(numels)])
    sums = [padded([n // size for n in bucket], size) + size * len(bucket) for bucket in buckets]
    total = sum(2 * (s.n - 1) * nbytes // s.n for nbytes in sums)
    return {"base": (len(buckets), total)} if buckets else {}


def of_base_at_the_start(numels: Sequence[int], first: bool, s: Setting) -> Moves:
    """What `dmuon.replicate` moves once: the first rank's values."""
    if s.n == 1 or not s.ddp:
        return {}
    nbytes = [numel * s.dtypes.weight for numel in numels]
    buckets = _bucketed(nbytes)
    return {"base": (len(buckets), 0 if first else sum(nbytes))} if buckets else {}


def _bucketed(sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive parameters, up to the size of a bucket."""
    buckets: list[list[int]] = []
    for size in sizes:
        if not buckets or sum(buckets[-1]) + size > BASE_BUCKET:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def in_sum(*addends: Moves) -> Moves:
    """The sum of several."""
    total: Moves = {}
    for moves in addends:
        add(total, moves)
    return total


def add(total: Moves, moves: Moves, times: int = 1) -> None:
    """Add `times` what is in `moves`."""
    for phase, (calls, nbytes) in moves.items():
        before = total.get(phase, (0, 0))
        total[phase] = (before[0] + times * calls, before[1] + times * nbytes)
