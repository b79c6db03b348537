"""Newton-Schulz by teams: the ranks that hold the pieces of a matrix orthogonalize it together.

An owner works alone on its matrix, so that a step takes at least as long as the most expensive matrix, no
matter how many ranks there are. A team of T ranks takes about a T-th of that. Each rank has a part X_r of X
(m x n with m <= n, cut along the long side; tall matrices: transposed), and each Newton-Schulz step is that
of the direct form (see `newton_schulz`), cut where the sums are:

    G_r = X_r X_r^T                           2 m^2 n/T operations, on every rank
    R = G_1 + ... + G_T                       reduce-scattered to blocks of m/T rows, then gathered
    W = b R + c R^2                           each rank its block of rows, 2 m^3/T operations; gathered
    X_r <- a X_r + W X_r                      2 m^2 n/T operations

One reduce-scatter and two all-gathers of m x m in the dtype of Newton-Schulz, each for all matrices that a
team has in one group. Nothing is whole anywhere: gradient and momentum stay where the parts are.

Rejected: one Gram matrix for all steps, whose rounding errors each step multiplies by a^2 (it takes float64,
and an owner who makes the factor alone); and teams of data-parallel ranks, where tensor parallelism is not
there. Those need a weight in parts at rest, gathered from several owners, and a reduction to several: another
kind of parameter beside the one that the engine has, for what a matrix cut by tensor parallelism has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..engine.collectives import TeamPeers
from ..engine.parameter import DedicatedParam
from ..engine.tensor_parallel import Slices
from ..ownership import Kind, Shareable, busiest_rank, choose_teams, chunks
from ..scratch import Scratch
from ..structure import PLAIN
from .newton_schulz import Settings, apply_factor, divide, gram_of, measure, operation_count
from .products import SymmetricProduct, multiply_add, symmetric_product

TeamPolicy = Literal["beneficial", "always", "never"]


@dataclass(frozen=True)
class Team:
    """How the ranks of a team orthogonalize their matrices."""

    settings: Settings

    def orthogonalize(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        peers: TeamPeers,
        cuts: Sequence[tuple[Slices, ...]] | None = None,
    ) -> list[Tensor]:
        """This rank's parts of the orthogonalized matrices, in the dtype of Newton-Schulz; new tensors.

        On all ranks of the team, with matrices of the same shapes in the same order.

        Args:
            parts: [rows, cols] of each matrix; the side that is not cut is whole. Read only.
            shapes: of the whole matrices.
            peers: the team.
            cuts: of each matrix, the parts of all ranks; None: all of one shape are cut alike. What goes into
                one batch has to be alike on all ranks, and this rank's part alone does not tell.
        """
        scratch = Scratch(reuse=False)
        dtype = self.settings.compute_dtype(parts[0].dtype, parts[0].device)
        batches: dict[tuple[torch.Size, object], list[int]] = {}  # matrices that are alike
        for index, shape in enumerate(shapes):
            cut = cuts and tuple((s.start, s.stop) for slices in cuts[index] for s in slices)
            batches.setdefault((shape, cut), []).append(index)
        measured = [measure(torch.stack([parts[i] for i in alike]), scratch) for alike in batches.values()]
        works = [
            _Work(x, shape, self.settings)
            for (shape, _), x in zip(batches, self._normalised(measured, dtype, peers, scratch), strict=True)
        ]
        for a, b, c in self.settings.triples:
            blocks = _reduce_scatter([work.gram() for work in works], peers)
            grams = _all_gather(blocks, [work.side for work in works], peers)
            blocks = [
                multiply_add(block, block, gram, alpha=c, beta=b, out=torch.empty_like(block))
                for block, gram in zip(blocks, grams, strict=True)
            ]
            factors = _all_gather(blocks, [work.side for work in works], peers)
            for work, factor in zip(works, factors, strict=True):
                work.apply(factor, a)
        found: dict[int, Tensor] = {}
        for work, alike in zip(works, batches.values(), strict=True):
            found |= zip(alike, work.x, strict=True)
        return [found[index] for index in range(len(parts))]

    def residual(self, orthogonal: Tensor, shape: torch.Size, peers: TeamPeers) -> Tensor:
        """What this rank adds to the sum of the squares of O O^T - I, from its part of O; 0 for zeros."""
        settings = replace(self.settings, backend="full")
        work = _Work(orthogonal[None].float(), shape, settings)
        block = _reduce_scatter([work.gram()], peers)[0][0]  # [rows of this rank, m]
        above = chunks(work.side, peers.size)[: peers.position]
        block.diagonal(sum(above)).sub_(1)
        is_zero = peers.all_gather(orthogonal.any().float().view(1)).sum() == 0
        return torch.where(is_zero, 0.0, torch.linalg.vector_norm(block, dtype=torch.float64).square())

    def _normalised(
        self,
        measured: Sequence[tuple[Tensor, Tensor, Tensor]],
        dtype: torch.dtype,
        peers: TeamPeers,
        scratch: Scratch,
    ) -> list[Tensor]:
        """The parts over the norms of the whole matrices, from `measure` of the parts of every batch."""
        own = torch.cat([torch.stack([peak, norm], 1).view(-1, 2) for _, peak, norm in measured])
        peaks, norms = peers.all_gather(own.view(-1)).view(peers.size, -1, 2).unbind(-1)  # [size, matrices]
        peak = peaks.amax(0)
        zero = peak == 0
        unit = peak.masked_fill(zero, 1)
        norm = torch.linalg.vector_norm(norms * (peaks / unit), dim=0)  # in units of the peak
        divisor = torch.maximum(norm, torch.full_like(unit, self.settings.eps) / unit)
        # Each part is in units of its own peak; one of zeros stays zero.
        mine = own[:, 0]
        divisor = (divisor * (unit / mine.masked_fill(mine == 0, 1))).masked_fill(zero | (mine == 0), 1)
        divisors = divisor.view(-1, 1, 1).split([len(scaled) for scaled, _, _ in measured])
        return [
            divide(scaled, each, dtype, scratch)
            for (scaled, _, _), each in zip(measured, divisors, strict=True)
        ]


class _Work:
    """This rank's parts of a batch of matrices of one shape, and the buffers they are iterated in."""

    def __init__(self, x: Tensor, shape: torch.Size, settings: Settings) -> None:
        self.x = x  # [batch, rows, cols] of the parts
        self.side = min(shape)
        # Of a square matrix, the side that is cut counts as the long one.
        self._tall = shape[0] > shape[1] or (shape[0] == shape[1] != x.shape[1])
        self._other = torch.empty_like(x)
        self._gram = x.new_empty(len(x), self.side, self.side)
        self._product: SymmetricProduct = symmetric_product(
            settings.backend, x.shape[1], x.shape[2], x.dtype, x.device
        )

    def gram(self) -> Tensor:
        """This rank's part of the Gram matrices, [batch, m, m]."""
        if self.x.numel() == 0:
            return self._gram.zero_()
        gram_of(self.x, self._product, out=self._gram, tall=self._tall)
        return self._gram

    def apply(self, factor: Tensor, scale: float) -> None:
        """x <- scale x + factor x, for the symmetric factor [batch, m, m]."""
        if self.x.numel():
            apply_factor(factor, self.x, scale=scale, out=self._other, tall=self._tall)
            self.x, self._other = self._other, self.x


def _reduce_scatter(addends: Sequence[Tensor], peers: TeamPeers) -> list[Tensor]:
    """This rank's blocks of rows of the sums, [batch, rows, m]. addends: [batch, m, m] each."""
    cut = [a.split(chunks(a.shape[1], peers.size), dim=1) for a in addends]
    send = torch.cat([blocks[rank].reshape(-1) for rank in range(peers.size) for blocks in cut])
    splits = [sum(blocks[rank].numel() for blocks in cut) for rank in range(peers.size)]
    shapes = [blocks[peers.position].shape for blocks in cut]
    mine = peers.reduce_scatter(send, splits).split([shape.numel() for shape in shapes])
    return [block.view(shape) for block, shape in zip(mine, shapes, strict=True)]


def _all_gather(blocks: Sequence[Tensor], sides: Sequence[int], peers: TeamPeers) -> list[Tensor]:
    """The whole [batch, m, m] from the blocks of rows of all ranks, which are sent at one height."""
    heights = [chunks(side, peers.size)[0] for side in sides]
    padded = [
        torch.nn.functional.pad(block, (0, 0, 0, height - block.shape[1])).reshape(-1)
        for block, height in zip(blocks, heights, strict=True)
    ]
    gathered = peers.all_gather(torch.cat(padded)).split([len(p) for p in padded], dim=1)
    wholes = []
    for rows, block, height, side in zip(gathered, blocks, heights, sides, strict=True):
        stacked = rows.view(peers.size, len(block), height, side).transpose(0, 1)
        wholes.append(stacked.reshape(len(block), peers.size * height, side)[:, :side].contiguous())
    return wholes


# Which matrices have a team


class Rates(NamedTuple):
    """What travelling costs, in operations of Newton-Schulz that a rank could do meanwhile."""

    byte: float  # received by one rank
    launch: float  # of a collective


# Nominal, and only for the choice of a policy: 400 TFLOP/s, 300 GB/s and 20 us on a GPU with NVLink between
# the ranks of a team; 100 GFLOP/s, 1 GB/s and 100 us between processes on a CPU.
_RATES = {"cpu": Rates(100, 1e7)}
_GPU = Rates(1300, 8e9)


def nominal_rates(device_type: str) -> Rates:
    """Of the devices that a policy chooses for."""
    return _RATES.get(device_type, _GPU)


def team_operations(rows: int, cols: int, size: int, steps: int) -> int:
    """Operations of each rank (of the first, which has most) of a team for one matrix."""
    m, n = sorted((rows, cols))
    return steps * (4 * m * m * chunks(n, size)[0] + 2 * m * m * chunks(m, size)[0])


def team_elements_of(position: int, rows: int, cols: int, size: int, steps: int) -> tuple[int, int]:
    """Elements, in the dtype of Newton-Schulz, that one rank of a team sends in the reduce-scatters of one
    matrix, and that it receives in all-gathers. Two numbers of 4 bytes from each other rank besides."""
    m = min(rows, cols)
    blocks = chunks(m, size)
    return steps * m * (m - blocks[position]), steps * 2 * (size - 1) * blocks[0] * m


def team_elements(rows: int, cols: int, size: int, steps: int) -> tuple[int, int]:
    """Of these, those of all ranks together."""
    of_ranks = [team_elements_of(position, rows, cols, size, steps) for position in range(size)]
    return sum(reduced for reduced, _ in of_ranks), sum(gathered for _, gathered in of_ranks)


def team_cost(shape: Sequence[int], size: int, steps: int, dtype: torch.dtype, rates: Rates) -> int:
    """Time of each rank of a team for one matrix, in operations."""
    rows, cols = shape
    sent = sum(team_elements(rows, cols, size, steps)) * dtype.itemsize / size
    travel = sent * rates.byte + 3 * steps * rates.launch
    return team_operations(rows, cols, size, steps) + int(travel)


def can_have_team(param: DedicatedParam) -> bool:
    """Whether a parameter is one matrix that tensor parallelism cuts."""
    return param.is_cut and param.structure == PLAIN and len(param.full_shape) == 2


def teams_of(
    policy: TeamPolicy, params: Sequence[DedicatedParam], settings: Settings, dtype: torch.dtype
) -> tuple[set[DedicatedParam], str]:
    """The parameters that have a team, alike on all ranks; and what that does, in words.

    policy: "beneficial": those whose team lets the busiest rank be done sooner; see `choose_teams`.
    """
    able = {index for index, param in enumerate(params) if can_have_team(param)}
    if policy == "never" or not able:
        return set(), ""
    works = [_shareable(param, settings, dtype) for param in params]
    chosen = able if policy == "always" else choose_teams(works)
    left = busiest_rank(works, chosen) / max(1, busiest_rank(works, ()))
    words = (
        f"{len(chosen)} of {len(params)} matrices by teams, whose busiest rank takes {left:.2f} of the time"
    )
    return {params[index] for index in chosen}, words


def _shareable(param: DedicatedParam, settings: Settings, dtype: torch.dtype) -> Shareable:
    size = param.tp.size if param.tp is not None else 1
    return shareable(
        row=param.layout.slot_of(param.coordinate),
        size=size,
        position=param.tp_owner if size > 1 else 0,
        kinds=param.structure.matrices(param.full_shape),
        able=can_have_team(param),
        settings=settings,
        dtype=dtype,
        rates=nominal_rates(param.layout.device.type),
    )


def shareable(
    *,
    row: int,
    size: int,
    position: int,
    kinds: Sequence[Kind],
    able: bool,
    settings: Settings,
    dtype: torch.dtype,
    rates: Rates,
) -> Shareable:
    """One parameter for `choose_teams`, with what it takes its TP owner and what a team, in operations.

    kinds: what it holds. able: it is a single matrix that may have a team. dtype: of Newton-Schulz.
    """
    steps = len(settings.triples)
    alone = sum(
        count * operation_count(rows, cols, steps=steps, algorithm=settings.form(rows, cols, dtype))
        for count, rows, cols in kinds
    )
    together = team_cost(kinds[0][1:], size, steps, dtype, rates) if able else None
    return Shareable(row, size, position, alone, together)


def check_policy(policy: object) -> TeamPolicy:
    """`policy` if it is one, else ValueError with the names."""
    if policy not in get_args(TeamPolicy):
        raise ValueError(f"tp_distributed_gram_policy must be one of {get_args(TeamPolicy)}, got {policy!r}")
    return policy  # type: ignore[return-value]
