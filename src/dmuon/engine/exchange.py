"""The exchange: from the pieces that tensor parallelism has cut to the parts that ranks keep, and back.

A TP owner keeps a whole matrix, a team (`dmuon.optim.team`) a part on each rank. One `all_to_all` carries all
matrices of a buffer: each rank sends every other what of its pieces lies in that one's parts. The way back is
the same plan with the two sides swapped, so that one is the inverse of the other whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .tensor_parallel import Slices


@dataclass(frozen=True)
class Cut:
    """A matrix in the exchange: by position in the TP group, who has which piece and who keeps which part."""

    shape: torch.Size  # of the whole
    pieces: tuple[Slices, ...]
    parts: tuple[Slices, ...]


class Exchange:
    """What the rank at `position` sends to whom, for matrices that the same TP group has cut."""

    def __init__(self, cuts: Sequence[Cut], position: int) -> None:
        self.size = len(cuts[0].pieces)
        self._pieces = [cut.pieces[position] for cut in cuts]  # of this rank
        self._parts = [cut.parts[position] for cut in cuts]
        # By the other rank, of each matrix: where in the piece, or in the part, lies what the two share.
        self._from_piece = [
            [_within(cut.parts[other], cut.pieces[position]) for cut in cuts] for other in range(self.size)
        ]
        self._to_part = [
            [_within(cut.pieces[other], cut.parts[position]) for cut in cuts] for other in range(self.size)
        ]
        self.piece_splits = [sum(map(_numel, shared)) for shared in self._from_piece]  # elements sent
        self.part_splits = [sum(map(_numel, shared)) for shared in self._to_part]  # elements received

    def pack_pieces(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """This rank's pieces, one for each matrix, for each rank in turn. buffer: [sum(piece_splits)]"""
        _pack(pieces, self._from_piece, buffer)

    def unpack_pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_pieces`: new tensors."""
        return _unpack(buffer, self._from_piece, self._pieces)

    def pack_parts(self, parts: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> None:
        """This rank's parts, one for each matrix; None for one that it has not. buffer: [sum(part_splits)]"""
        _pack(parts, self._to_part, buffer)

    def unpack_parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_parts`: new tensors, one for each matrix, also if empty."""
        return _unpack(buffer, self._to_part, self._parts)


def whole_at(position: int, size: int, shape: torch.Size) -> tuple[Slices, ...]:
    """The parts of a matrix that one position keeps whole."""
    whole, nothing = tuple(slice(0, n) for n in shape), tuple(slice(0, 0) for _ in shape)
    return tuple(whole if i == position else nothing for i in range(size))


def shape_of(slices: Slices) -> torch.Size:
    """Of a piece or a part."""
    return torch.Size(s.stop - s.start for s in slices)


def _numel(slices: Slices) -> int:
    return shape_of(slices).numel()


def _within(one: Slices, other: Slices) -> Slices:
    """What two ranges of a matrix share, seen from the beginning of the other one."""
    bounds = [(max(a.start, b.start), min(a.stop, b.stop), b.start) for a, b in zip(one, other, strict=True)]
    if any(start >= stop for start, stop, _ in bounds):
        return tuple(slice(0, 0) for _ in bounds)
    return tuple(slice(start - base, stop - base) for start, stop, base in bounds)


def _pack(tensors: Sequence[torch.Tensor | None], shared: list[list[Slices]], buffer: torch.Tensor) -> None:
    pairs = (pair for each in shared for pair in zip(tensors, each, strict=True))
    runs = [tensor[slices].reshape(-1) for tensor, slices in pairs if tensor is not None]
    if runs:
        torch.cat(runs, out=buffer)


def _unpack(buffer: torch.Tensor, shared: list[list[Slices]], wanted: Sequence[Slices]) -> list[torch.Tensor]:
    tensors = [buffer.new_empty(shape_of(slices)) for slices in wanted]
    start = 0
    for each in shared:
        for tensor, slices in zip(tensors, each, strict=True):
            numel = _numel(slices)
            tensor[slices] = buffer[start : start + numel].view(shape_of(slices))
            start += numel
    return tensors
