"""Newton-Schulz on a matrix that stays in pieces: its small Gram matrix travels, and a factor comes back.

With X = U / |U| for a wide U (m <= n) that is cut by columns into pieces U_r, every Newton-Schulz step
multiplies X from the left by a polynomial in R = X X^T, and so do all of them together (see `newton_schulz`):

    |U|^2 R = sum_r U_r U_r^T                   each rank's m x m part goes to the TP owner,
    F = q_k ... q_1 q_0 / |U|                   which makes the factor and sends it back,
    O_r = F U_r                                 for every rank to apply to its own piece

(tall matrices cut by rows: transposed). Momentum and gradient never leave their ranks. Both matrices are
symmetric: their lower triangles travel.

In float64 whatever the dtype of the rest: R squares the condition of X, so that float32 would lose singular
values below sqrt(1e-7) of the largest (`newton_schulz` makes a new R from X every two steps for that reason;
here each would cost another round trip). In triangles, float64 moves about what whole float32 matrices would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..engine.parameter import DedicatedParam
from ..structure import PLAIN
from .newton_schulz import Triple

GramPolicy = Literal["beneficial", "always", "never"]

_DTYPE = torch.float64
_TOLERANCE = 1e-7  # how much of the roundoff of R may show in the result, relative to it


@dataclass(frozen=True)
class GramUpdate:
    """One matrix's update while only this rank's piece of it is here.

    Attributes:
        direction: this rank's piece of U, the matrix to orthogonalize.
        by_rows: U is tall and cut by rows, so that its Gram matrix is U^T U; else U U^T.
        triples: the coefficients (a, b, c) of each step.
        eps: the smallest norm that U is divided by.
    """

    direction: Tensor
    by_rows: bool
    triples: Sequence[Triple]
    eps: float = 1e-7

    def gram(self) -> Tensor:
        """This rank's part of the Gram matrix, packed: [m (m + 1) / 2], float64."""
        piece = self.direction.to(_DTYPE)
        return _pack(piece.mT @ piece if self.by_rows else piece @ piece.mT)

    def factor(self, gram: Tensor) -> Tensor:
        """F from the sum of all parts of the Gram matrix; both packed."""
        r = _unpack(gram)  # m x m
        norm = r.diagonal().sum().sqrt().clamp(min=self.eps)
        r = r / norm.square()
        identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
        product = identity / norm
        for a, b, c in self.triples:
            q = a * identity + b * r + c * (r @ r)
            product = q @ product
            r = q @ r @ q
        return _pack(product)

    def orthogonal(self, factor: Tensor) -> Tensor:
        """This rank's piece of the orthogonalized matrix, in the dtype of `direction`."""
        f, piece = _unpack(factor), self.direction.to(_DTYPE)
        return (piece @ f if self.by_rows else f @ piece).to(self.direction.dtype)


def cut_by_its_long_side(param: DedicatedParam) -> bool:
    """Whether tensor parallelism cuts the long side and nothing else: then the parts of R are small."""
    tp = param.tp
    if tp is None or not param.is_cut:
        return False
    dims = {tp.placements[dim].dim for dim in tp.cutting}  # type: ignore[attr-defined]
    return len(dims) == 1 and tp.shape[dims.pop()] == max(tp.shape)


def moves_fewer_bytes(pieces: Sequence[int], tp_owner: int, gram_numel: int, itemsizes: int) -> bool:
    """Whether Gram parts and factors of one step are fewer bytes than pieces of the gradient and the update.

    Args:
        pieces: elements of the matrix on each rank.
        tp_owner: whose piece would not travel.
        gram_numel: elements of a triangle of the Gram matrix.
        itemsizes: bytes of an element of the gradient and one of the update together, as they would travel.
    """
    gram = 2 * (len(pieces) - 1) * gram_numel * _DTYPE.itemsize
    return gram < (sum(pieces) - pieces[tp_owner]) * itemsizes


def chooses(policy: GramPolicy, param: DedicatedParam, gradient: torch.dtype, weight: torch.dtype) -> bool:
    """Whether `policy` keeps a parameter in pieces.

    gradient, weight: the dtypes in which the pieces of the gradient and of the update would travel.
    """
    if policy == "never" or param.structure != PLAIN or not cut_by_its_long_side(param):
        return False
    assert param.tp is not None
    pieces = [param.tp.shape_of(position).numel() for position in range(param.tp.size)]
    itemsizes = gradient.itemsize + weight.itemsize
    return policy == "always" or moves_fewer_bytes(pieces, param.tp_owner, param.tp.gram_numel, itemsizes)


def check_policy(policy: object) -> GramPolicy:
    """`policy` if it is one, else ValueError with the names."""
    if policy not in get_args(GramPolicy):
        raise ValueError(f"tp_distributed_gram_policy must be one of {get_args(GramPolicy)}, got {policy!r}")
    return policy  # type: ignore[return-value]


def check_triples(triples: Sequence[Triple]) -> None:
    """Refuse so many steps that the error of one Gram matrix would show: each multiplies it by a^2.

    Raises:
        ValueError: with what can be changed.
    """
    growth = math.prod(a * a for a, _, _ in triples)
    if growth * torch.finfo(_DTYPE).eps > _TOLERANCE:
        raise ValueError(
            f"{len(triples)} Newton-Schulz steps on one Gram matrix would lose too many digits; take fewer "
            "ns_steps, or tp_distributed_gram=False"
        )


def _pack(symmetric: Tensor) -> Tensor:
    rows, cols = torch.tril_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, cols]


def _unpack(packed: Tensor) -> Tensor:
    side = (math.isqrt(8 * packed.numel() + 1) - 1) // 2
    rows, cols = torch.tril_indices(side, side, device=packed.device)
    whole = packed.new_empty(side, side)
    whole[rows, cols] = packed
    whole[cols, rows] = packed
    return whole
