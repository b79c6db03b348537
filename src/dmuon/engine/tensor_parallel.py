"""How tensor parallelism has cut a parameter: which ranks hold which piece of the matrix."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from .layout import ranks_by_group, wrap_local

Slices = tuple[slice, ...]  # one per dim of the full tensor


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel side of a parameter that is a DTensor on a mesh of its own.

    Any number of mesh dims may cut it, along any tensor dim, into pieces of different sizes, some of them
    empty. Mesh dims that replicate it are not part of its TP group: their ranks do the same work twice.
    """

    mesh: DeviceMesh  # the parameter's own, without data-parallel dims
    placements: tuple[Placement, ...]  # on `mesh`
    shape: torch.Size  # of the full tensor
    ranks: tuple[int, ...]  # global ranks of this rank's TP group, by position
    position: int  # of this rank in `ranks`
    pieces: tuple[Slices, ...]  # of the full tensor, by position
    places: tuple[tuple[int, ...], ...]  # by position: the rank in the process group of each cutting mesh dim
    copies: tuple[int, ...] = ()  # global ranks that hold the same piece as this rank, itself among them

    @property
    def size(self) -> int:
        """Number of pieces; 1 if nothing cuts the parameter."""
        return len(self.ranks)

    @property
    def shard_dim(self) -> int | None:
        """The tensor dim that is cut; the first mesh dim's, if several cut different ones; None if uncut."""
        dims = [self.placements[dim].dim for dim in self.cutting]  # type: ignore[attr-defined]
        return dims[0] if dims else None

    @property
    def long_dim(self) -> int:
        """The longer side, along which a team has parts; of two equal ones, that which is cut already."""
        rows, cols = self.shape
        return (self.shard_dim or 0) if rows == cols else int(cols > rows)

    @property
    def piece_shape(self) -> torch.Size:
        """Shape of this rank's piece."""
        return self.shape_of(self.position)

    def shape_of(self, position: int) -> torch.Size:
        """Shape of the piece at a position."""
        return torch.Size(s.stop - s.start for s in self.pieces[position])

    def wrap(self, piece: torch.Tensor, placements: tuple[Placement, ...] | None = None) -> DTensor:
        """The DTensor that the module computes with, whose local tensor is `piece` itself; or of a part, with
        other placements."""
        return wrap_local(piece, self.shape, self.mesh, placements or self.placements)

    @property
    def owner_placements(self) -> tuple[Placement, ...]:
        """Placements, on `mesh`, of what lives whole on the TP owner.

        Of another dim than the weight's own: by this, a gradient of ours is told from one in pieces.
        """
        return tuple(
            Shard(0 if p.dim else 1) if dim in self.cutting else p  # type: ignore[attr-defined]
            for dim, p in enumerate(self.placements)
        )

    @property
    def team_placements(self) -> tuple[Placement, ...]:
        """Placements, on `mesh`, of what lives in parts on the team."""
        long = Shard(self.long_dim)
        return tuple(long if dim in self.cutting else p for dim, p in enumerate(self.placements))

    @property
    def team_parts(self) -> tuple[Slices, ...]:
        """The parts of the matrix, by position: the long side shared out."""
        sizes = [self.mesh.shape[dim] for dim in self.cutting]
        return tuple(
            _slices(self.shape, [(self.long_dim, n, i) for n, i in zip(sizes, place, strict=True)])
            for place in self.places
        )

    @property
    def cutting(self) -> tuple[int, ...]:
        """The mesh dims that cut the parameter."""
        sizes = self.mesh.shape
        return tuple(d for d, (p, n) in enumerate(zip(self.placements, sizes, strict=True)) if _cuts(p, n))

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The mesh's own process group of `ranks`; None if no single mesh dim has it."""
        groups = self.mesh.get_all_groups()
        return next((g for g in groups if tuple(dist.get_process_group_ranks(g)) == self.ranks), None)

    def addend(self, gradient: DTensor) -> torch.Tensor:
        """This rank's addend of the gradient of its piece: the sum over `copies` is the whole.

        No collective, so that some copies may have a gradient and others none: what is Partial is an addend
        already, and of what all copies have alike, the first one's counts.
        """
        sums = [p == Partial() and own.is_replicate() for p, own in self._pairs(gradient)]
        if any(p != own and not is_sum for (p, own), is_sum in zip(self._pairs(gradient), sums, strict=True)):
            gradient = gradient.redistribute(placements=self.placements)  # a rare layout
            sums = [False] * len(sums)
        local = gradient.to_local()
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        alike = zip(coordinate, self.placements, sums, strict=True)
        counts_elsewhere = any(c > 0 and own.is_replicate() and not is_sum for c, own, is_sum in alike)
        return torch.zeros_like(local) if counts_elsewhere else local

    def _pairs(self, gradient: DTensor) -> list[tuple[Placement, Placement]]:
        return list(zip(gradient.placements, self.placements, strict=True))

    def broadcast_from(self, tensor: torch.Tensor, position: int) -> None:
        """Bring a tensor from one position to all of the TP group, in place, one mesh dim after the other.

        Synchronous, on the mesh's own process groups.
        """
        for dim, coordinate in zip(self.cutting, self.places[position], strict=True):
            group = self.mesh.get_group(dim)
            dist.broadcast(tensor, dist.get_process_group_ranks(group)[coordinate], group=group)

    @classmethod
    def of(cls, tensor: DTensor, mesh: DeviceMesh | None = None) -> TensorParallel:
        """Read the cut off a DTensor, as `parallelize_module` makes them. mesh: one that equals its own."""
        mesh, placements, shape = mesh or tensor.device_mesh, tensor.placements, tensor.shape
        cutting = [dim for dim, p in enumerate(placements) if _cuts(p, mesh.shape[dim])]
        grid = ranks_by_group(mesh)
        here = (grid == dist.get_rank()).nonzero()[0].tolist()
        same: list = [here[dim] if dim in cutting else slice(None) for dim in range(mesh.ndim)]
        others: list = [slice(None) if dim in cutting else here[dim] for dim in range(mesh.ndim)]
        sizes = [mesh.shape[dim] for dim in cutting]
        places = itertools.product(*map(range, sizes))  # row-major, as the grid is
        # In the order of a process group of these ranks, which ascends.
        ranks, where = zip(
            *sorted(zip(grid[tuple(others)].flatten().tolist(), places, strict=True)), strict=True
        )
        pieces = tuple(
            _slices(shape, [(placements[d].dim, n, i) for d, n, i in zip(cutting, sizes, place, strict=True)])  # type: ignore[attr-defined]
            for place in where
        )
        copies = tuple(sorted(grid[tuple(same)].flatten().tolist()))
        position = ranks.index(dist.get_rank())
        return cls(mesh, tuple(placements), shape, ranks, position, pieces, where, copies)


def _cuts(placement: Placement, size: int) -> bool:
    return isinstance(placement, Shard) and size > 1


def _slices(shape: torch.Size, cuts: list[tuple[int, int, int]]) -> Slices:
    """The piece of a tensor that is left when, in turn, dim d is cut into n chunks and the i-th is taken."""
    bounds = [(0, size) for size in shape]
    for dim, chunks, index in cuts:
        start, stop = bounds[dim]
        step = -(-(stop - start) // chunks)
        first = min(start + index * step, stop)
        bounds[dim] = (first, min(first + step, stop))
    return tuple(slice(start, stop) for start, stop in bounds)
