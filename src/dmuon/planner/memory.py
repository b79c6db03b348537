"""What a rank keeps, in bytes, as formulas: of dedicated matrices, by role, and of base parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .traffic import Buffer, Role, Setting, padded


class Rest(NamedTuple):
    """Bytes that a rank keeps from one step to the next.

    Attributes:
        weights: dedicated weights that it keeps.
        momentum: of those that it owns.
        gradients: likewise, from the end of backward to `zero_grad`.
        gathered: gathered weights that stay; under DDP, where the dtypes agree, the owner's weights are in
            there.
        base_weights, base_moments, base_gradients: of base parameters: its shard, or under DDP all; AdamW's
            two moments.
    """

    weights: int = 0
    momentum: int = 0
    gradients: int = 0
    gathered: int = 0
    base_weights: int = 0
    base_moments: int = 0
    base_gradients: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self)


def in_sum(*addends: Rest) -> Rest:
    """The sum of several."""
    return Rest(*map(sum, zip(*addends, strict=True)))


def at_rest(buffer: Buffer, role: Role, tp: int, s: Setting) -> Rest:
    """What a rank keeps of a buffer."""
    dtypes = s.dtypes
    numels = [share.piece(tp) for share in buffer]
    keeps = role is not Role.OTHER and not (s.ddp and dtypes.weight == dtypes.compute)
    state = 0
    if role is Role.OWNER:
        for share in buffer:
            if len(share.pieces) == 1 or share.gram is not None:
                state += share.piece(tp)
            elif share.tp_owner == tp:
                state += sum(share.pieces)
    return Rest(
        weights=dtypes.weight * sum(numels) if keeps else 0,
        momentum=dtypes.momentum * state,
        gradients=dtypes.weight * state,
        gathered=padded(numels, dtypes.compute) if s.ddp else 0,
    )


def of_base(numel: int, trainable: int, s: Setting) -> Rest:
    """What a rank keeps of base parameters. numel, trainable: elements on this rank."""
    size = s.dtypes.weight
    return Rest(base_weights=size * numel, base_moments=2 * size * trainable, base_gradients=size * trainable)


@dataclass(frozen=True)
class Work:
    """Bytes at a time on top of what rests, at most, without activations.

    Attributes:
        forward: gathered weights: two groups that follow each other; all, if they stay until backward.
        backward: gathered weights of three groups (all, if they stayed), and of one group the whole gradients
            and the packed buffer. More, if the network does not keep up.
    """

    forward: int
    backward: int


def of_groups(gathered: Sequence[int], gradients: Sequence[int], s: Setting) -> Work:
    """Bytes while groups run.

    Args:
        gathered: by group, in order: bytes of its gathered weights.
        gradients: likewise, of its gradients from backward, and their packed buffers.
    """
    gradient = max(gradients, default=0)
    if s.ddp:
        return Work(0, gradient)
    if not s.reshard:
        return Work(sum(gathered), sum(gathered) + gradient)
    return Work(most_of(gathered, 2), most_of(gathered, 3) + gradient)


def most_of(sizes: Sequence[int], count: int) -> int:
    """The largest sum of `count` sizes that follow each other."""
    return max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)


def newton_schulz(rows: int, cols: int, compute: int) -> int:
    """Bytes of work for one matrix, about: its direction and a normalized copy in float32, two buffers of its
    size and three Gram matrices in the dtype of the products."""
    side = min(rows, cols)
    return (2 * 4 + 2 * compute) * rows * cols + 3 * compute * side * side
