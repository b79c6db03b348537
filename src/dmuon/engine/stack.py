"""Stacks of matrices that FSDP2 or expert parallelism keep whole on their ranks: they need no owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.nn as nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from ..structure import Structure


@dataclass(frozen=True, eq=False)
class Stack:
    """A base parameter [E, rows, cols] (or [L, E, rows, cols]) cut along leading dims only, so that every
    matrix is whole on some rank, which orthogonalizes it. It stays with FSDP2 and its collectives."""

    name: str
    module: nn.Module
    attribute: str
    structure: Structure

    @property
    def param(self) -> nn.Parameter:
        """The parameter as it is now; `fully_shard` replaces it."""
        return cast(nn.Parameter, self.module._parameters[self.attribute])

    def check(self) -> None:
        """Refuse a parameter whose matrices are cut.

        Raises:
            ValueError: with its name and the way out.
        """
        param = self.param
        if isinstance(param, DTensor) and not lies_whole(param, self.structure):
            raise ValueError(
                f"{self.name} holds {param.shape[0]} matrices, which fully_shard or tensor parallelism cuts "
                f"({' '.join(map(str, param.placements))}). Shard its first dim, as fully_shard does by "
                "default (for more ranks than matrices too: leave them out of shard_placement_fn), or give "
                "it to AdamW by the predicate."
            )


def lies_whole(param: DTensor, structure: Structure) -> bool:
    """Whether placements cut no matrix."""
    leading = structure.stacked(param.shape)
    return all(p.is_replicate() or (_dim(p) is not None and _dim(p) < leading) for p in param.placements)  # type: ignore[operator]


def _dim(placement: Placement) -> int | None:
    # _StridedShard is a Shard in some versions of torch only.
    if placement.is_shard() or isinstance(placement, _StridedShard):
        return placement.dim  # type: ignore[attr-defined]
    return None
