"""The exchange: pieces of matrices to their TP owners, and back.

One `all_to_all` carries all matrices of a bucket: each rank of the TP group sends every TP owner its pieces
of that owner's matrices. The way back is the same plan with the two sides swapped, so that one is the
inverse of the other whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Cut:
    """A matrix in the exchange: how it is cut, and the position of its TP owner."""

    tp: TensorParallel
    owner: int


class Exchange:
    """What this rank sends to whom, for matrices that the same TP group has cut."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self.cuts = tuple(cuts)
        self.size = cuts[0].tp.size
        self.position = cuts[0].tp.position
        self._owned = [cut for cut in cuts if cut.owner == self.position]
        self.piece_splits = [  # elements of this rank's pieces, by the TP owner they belong to
            sum(cut.tp.piece_shape.numel() for cut in cuts if cut.owner == owner)
            for owner in range(self.size)
        ]
        self.owned_splits = [  # elements of the matrices this rank owns, by the rank whose pieces they are
            sum(cut.tp.shape_of(position).numel() for cut in self._owned) for position in range(self.size)
        ]

    def pack_pieces(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's pieces, one per matrix, in the order of their TP owners. -> [sum(piece_splits)]"""
        ordered = sorted(zip(self.cuts, pieces, strict=True), key=lambda pair: pair[0].owner)  # stable
        return torch.cat([piece.reshape(-1) for _, piece in ordered])

    def unpack_pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_pieces`: views of `buffer`, one per matrix."""
        order = sorted(range(len(self.cuts)), key=lambda i: self.cuts[i].owner)
        views: dict[int, torch.Tensor] = {}
        start = 0
        for i in order:
            shape = self.cuts[i].tp.piece_shape
            views[i] = buffer[start : start + shape.numel()].view(shape)
            start += shape.numel()
        return [views[i] for i in range(len(self.cuts))]

    def pack_owned(self, wholes: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The matrices this rank owns, in the pieces of each rank in turn. -> [sum(owned_splits)]

        `like` gives dtype and device where it owns none.
        """
        parts = [
            whole[cut.tp.pieces[position]].reshape(-1)
            for position in range(self.size)
            for cut, whole in zip(self._owned, wholes, strict=True)
        ]
        return torch.cat(parts) if parts else like.new_empty(0)

    def unpack_owned(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `pack_owned`: new whole matrices, one per matrix that this rank owns."""
        wholes = [buffer.new_empty(cut.tp.shape) for cut in self._owned]
        start = 0
        for position in range(self.size):
            for cut, whole in zip(self._owned, wholes, strict=True):
                shape = cut.tp.shape_of(position)
                whole[cut.tp.pieces[position]] = buffer[start : start + shape.numel()].view(shape)
                start += shape.numel()
        return wholes
