"""The owners of all matrices of a model, from shapes alone.

`dedicate_params` calls it at run time and the planner without a model or a process group, so that what is
planned is what will run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch.nn as nn

from .assignment import Matrix, assign
from .base import block_modules, enclosing
from .optim.newton_schulz import operation_count
from .selection import Candidate


def blocks_of(model: nn.Module, chosen: Sequence[Candidate]) -> list[str | None]:
    """The name of the repeated block that each parameter is in; None outside of all."""
    blocks = block_modules(model)
    of_module: dict[str, str | None] = {}
    for candidate in chosen:
        module = candidate.path.rpartition(".")[0]
        if module not in of_module:
            of_module[module] = enclosing(module, blocks)
    return [of_module[candidate.path.rpartition(".")[0]] for candidate in chosen]


def matrices_of(shapes: Sequence[tuple[int, int]], blocks: Sequence[Hashable]) -> list[Matrix]:
    """What the assignment needs to know of each matrix.

    Args:
        shapes: rows and columns of the whole matrices, in module order.
        blocks: for each matrix the repeated block of the model that it is in; matrices of one block belong
            together. Where FSDP2 will put its boundaries is not known yet.
    """
    numbers: dict[Hashable, int] = {}
    return [
        Matrix(operation_count(rows, cols), rows * cols, numbers.setdefault(block, len(numbers)))
        for (rows, cols), block in zip(shapes, blocks, strict=True)
    ]


def choose_owners(
    matrices: Sequence[Matrix], slots: int, tp_groups: Sequence[tuple[int, ...]]
) -> tuple[list[int], list[int]]:
    """The owner slot of each matrix, and the position of its TP owner among the ranks that hold its pieces.

    TP owners are balanced among the matrices of one owner. Nothing is to be gained from a shared TP owner:
    one exchange carries them all.

    Args:
        matrices: in module order, the same on every rank.
        slots: number of data-parallel ranks.
        tp_groups: for each matrix the ranks that hold its pieces; at most one rank if nothing cuts it.

    Raises:
        ValueError: as :func:`dmuon.assignment.assign`.
    """
    owners = assign(matrices, slots)
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, (slot, ranks) in enumerate(zip(owners, tp_groups, strict=True)):
        if len(ranks) > 1:
            together.setdefault((slot, ranks), []).append(index)
    positions = [0] * len(matrices)
    for (_, ranks), members in together.items():
        chosen = assign([matrices[i] for i in members], len(ranks), small_threshold=0)
        for index, position in zip(members, chosen, strict=True):
            positions[index] = position
    return owners, positions
