"""The exchange: pieces of matrices to their TP owners, and back.

One `all_to_all` carries all matrices of a bucket: each rank of the TP group sends every TP owner its pieces
of that owner's matrices. The way back is the same plan with the two sides swapped, so that one is the
inverse of the other whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .tensor_parallel import Slices, TensorParallel


@dataclass(frozen=True)
class Cut:
    """A matrix in the exchange: who has which piece of it, and who owns it."""

    shape: torch.Size  # of the whole
    pieces: tuple[Slices, ...]  # by position in the TP group
    owner: int  # position

    @classmethod
    def of(cls, tp: TensorParallel, owner: int) -> Cut:
        """A parameter, as tensor parallelism has cut it."""
        return cls(tp.shape, tp.pieces, owner)

    @classmethod
    def one_each(cls, size: int, numel: int, owner: int) -> Cut:
        """Something of `numel` elements from or to each of `size` ranks. The whole: [size, numel]."""
        pieces = tuple((slice(i, i + 1), slice(0, numel)) for i in range(size))
        return cls(torch.Size((size, numel)), pieces, owner)

    def shape_of(self, position: int) -> torch.Size:
        """Shape of the piece at a position."""
        return torch.Size(s.stop - s.start for s in self.pieces[position])


class Exchange:
    """What the rank at `position` sends to whom, for matrices that the same TP group has cut."""

    def __init__(self, cuts: Sequence[Cut], position: int) -> None:
        self.cuts = tuple(cuts)
        self.size = len(cuts[0].pieces)
        self.position = position
        self._owned = [cut for cut in cuts if cut.owner == position]
        self.piece_splits = [  # elements of this rank's pieces, by the TP owner they belong to
            sum(cut.shape_of(position).numel() for cut in cuts if cut.owner == owner)
            for owner in range(self.size)
        ]
        self.owned_splits = [  # elements of the matrices this rank owns, by the rank whose pieces they are
            sum(cut.shape_of(other).numel() for cut in self._owned) for other in range(self.size)
        ]

    def pack_pieces(self, pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """This rank's pieces, one per matrix, in the order of their TP owners. buffer: [sum(piece_splits)]"""
        ordered = sorted(zip(self.cuts, pieces, strict=True), key=lambda pair: pair[0].owner)  # stable
        torch.cat([piece.reshape(-1) for _, piece in ordered], out=buffer)

    def unpack_pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_pieces`: views of `buffer`, one per matrix."""
        order = sorted(range(len(self.cuts)), key=lambda i: self.cuts[i].owner)
        views: dict[int, torch.Tensor] = {}
        start = 0
        for i in order:
            shape = self.cuts[i].shape_of(self.position)
            views[i] = buffer[start : start + shape.numel()].view(shape)
            start += shape.numel()
        return [views[i] for i in range(len(self.cuts))]

    def pack_owned(self, wholes: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """The matrices this rank owns, in the pieces of each rank in turn. buffer: [sum(owned_splits)]"""
        parts = [
            whole[cut.pieces[position]].reshape(-1)
            for position in range(self.size)
            for cut, whole in zip(self._owned, wholes, strict=True)
        ]
        if parts:
            torch.cat(parts, out=buffer)

    def unpack_owned(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_owned`: new whole matrices, one per matrix that this rank owns."""
        wholes = [buffer.new_empty(cut.shape) for cut in self._owned]
        start = 0
        for position in range(self.size):
            for cut, whole in zip(self._owned, wholes, strict=True):
                shape = cut.shape_of(position)
                whole[cut.pieces[position]] = buffer[start : start + shape.numel()].view(shape)
                start += shape.numel()
        return wholes
