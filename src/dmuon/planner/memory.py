"""What a rank keeps, in bytes: of dedicated matrices and of base parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .traffic import Dtypes, Group


class Rest(NamedTuple):
    """Bytes that a rank keeps from one step to the next.

    Attributes:
        weights: dedicated weights that it keeps.
        momentum: of those that it owns.
        gradients: likewise, from the end of backward to `zero_grad`.
        base_weights, base_moments, base_gradients: its shard of base parameters and of stacks, under DDP all;
            AdamW's two moments.
    """

    weights: int = 0
    momentum: int = 0
    gradients: int = 0
    base_weights: int = 0
    base_moments: int = 0
    base_gradients: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self)


def in_sum(addends: Iterable[Rest]) -> Rest:
    """The sum of several."""
    return Rest(*map(sum, zip(*addends, strict=True)))


def at_rest(group: Group, shard: int, replicate: int) -> Rest:
    """What a rank keeps of a group."""
    dtypes = group.dtypes
    state = sum(share.state(group.tp) for share in group.owned.get((shard, replicate), ()))
    return Rest(
        weights=dtypes.weight.itemsize * group.kept[shard],
        momentum=dtypes.momentum.itemsize * state,
        gradients=dtypes.weight.itemsize * state,
    )


def of_updates(group: Group, shard: int, replicate: int) -> int:
    """Bytes that an owner keeps from a step until they are published; of a team, its part of what
    is to be orthogonalized."""
    dtypes, total = group.dtypes, 0
    for share in group.owned.get((shard, replicate), ()):
        if share.is_cut or group.mesh.replicate > 1:
            dtype = dtypes.newton_schulz if share.team is None else dtypes.momentum
            total += dtype.itemsize * share.state(group.tp)
    return total


def of_base(numel: int, trainable: int, stacks: int, dtypes: Dtypes) -> Rest:
    """What a rank keeps of base parameters, and of stacks: they are FSDP2's, with Muon's momentum.

    numel, trainable, stacks: elements on this rank.
    """
    size = dtypes.weight.itemsize
    return Rest(
        momentum=dtypes.momentum.itemsize * stacks,
        base_weights=size * (numel + stacks),
        base_moments=2 * size * trainable,
        base_gradients=size * (trainable + stacks),
    )


class Work(NamedTuple):
    """Bytes at a time while groups run, at most, without activations.

    Attributes:
        gathered: weights of two groups that follow each other; of all, if they stay until backward; none
            where the model computes with the weights at rest.
        gradients: in backward, whole ones of two groups that follow each other, and the packed buffer of one.
    """

    gathered: int
    gradients: int


def of_groups(groups: Sequence[Group]) -> Work:
    """While the groups of a model run, in order."""
    mesh, dtypes = groups[0].mesh, groups[0].dtypes
    is_resting = mesh.shard == 1 and dtypes.compute == dtypes.weight
    gathered = [0 if is_resting else dtypes.compute.itemsize * group.weights.total for group in groups]
    gradients = [dtypes.compute.itemsize * sum(group.weights.numels) for group in groups]
    packed = max(dtypes.reduce.itemsize * group.gradients.total for group in groups)
    frees = groups[0].reshard and not mesh.ddp
    return Work(_most_of(gathered, 2) if frees else sum(gathered), _most_of(gradients, 2) + packed)


def _most_of(sizes: Sequence[int], count: int) -> int:
    """The largest sum of `count` sizes that follow each other."""
    return max(sum(sizes[i : i + count]) for i in range(len(sizes)))


def newton_schulz(rows: int, cols: int, compute: torch.dtype) -> int:
    """Bytes of work for one matrix, about: its direction and a normalized copy in float32, two buffers of its
    size and three Gram matrices in the dtype of the products."""
    side = min(rows, cols)
    return (2 * 4 + 2 * compute.itemsize) * rows * cols + 3 * compute.itemsize * side * side
