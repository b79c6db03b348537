"""Which matrices a parameter holds: most hold one, stacks of experts and fused projections several.

Muon treats each matrix by itself: its own norm, its own orthogonalization, its own scale. Pure: shapes and
views, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """How a parameter is cut into matrices.

    In this order: leading dims count matrices ("stacks"); the last two are a matrix, [out, in], or [in, out]
    if `transposed`; its outputs (or its inputs, with `dim="in"`) are cut by `sizes`, `repeats` times over.

    - Fused queries, keys and values of 32 and 8 heads of 128: `Structure(sizes=(4096, 1024, 1024))`.
    - The same, head by head (GPT-NeoX: q, k, v of one head, then of the next):
      `Structure(sizes=(128, 128, 128), repeats=32)`. The queries of all heads are one matrix.
    - One matrix for each head of 128: `Structure(sizes=(128,), repeats=32, apart=True)`.
    - GPT-2's `Conv1D`: `Structure(transposed=True)`.
    - Experts [E, 2 f, d], gate and up behind each other: `Structure(sizes=(f, f))`.
    - A convolution [out, in, height, width] as one matrix, out x (in height width): `Structure(kernel=2)`.

    Attributes:
        sizes: of the parts along the dim that is cut, in one repeat; empty: it is not cut.
        repeats: how often the sizes come behind each other.
        apart: each repeat is a matrix of its own; else the parts of all repeats are one matrix together.
        dim: "out" or "in": which dim of the matrix is cut.
        transposed: stored as [in, out]. The shape's scale is that of [out, in].
        kernel: trailing dims that belong to the inputs (2 for a `Conv2d`).
    """

    sizes: tuple[int, ...] = ()
    repeats: int = 1
    apart: bool = False
    dim: str = "out"
    transposed: bool = False
    kernel: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if any(not isinstance(size, int) or size < 1 for size in (*self.sizes, self.repeats)):
            raise ValueError(f"sizes and repeats must be integers of at least 1, got {self}")
        if self.dim not in ("out", "in"):
            raise ValueError(f'dim must be "out" or "in", got {self.dim!r}')
        if self.repeats > 1 and not self.sizes:
            raise ValueError(f"{self.repeats} repeats of what? Give the sizes of one")
        if self.kernel and self.transposed:
            raise ValueError("a kernel's inputs come last: it cannot be transposed")

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a shape that it does not fit.

        Raises:
            ValueError: with the parameter's name, if it has too few dims, or sizes do not add up.
        """
        if len(shape) - self.kernel < 2:
            raise ValueError(f"{name} has shape {tuple(shape)}, too few dims for {self}")
        if self.sizes:
            rows, cols = self._sides(shape)
            there, wanted = rows if self.dim == "out" else cols, sum(self.sizes) * self.repeats
            if there != wanted:
                raise ValueError(
                    f"{name} has shape {tuple(shape)}: its {there} {self.dim}puts are not the {wanted} of "
                    f"sizes {self.sizes} x {self.repeats}"
                )

    @property
    def is_cut(self) -> bool:
        """Whether the last dims hold several matrices."""
        return len(self.sizes) > 1 or (self.apart and self.repeats > 1)

    def stacked(self, shape: Sequence[int]) -> int:
        """How many leading dims count matrices."""
        return len(shape) - 2 - self.kernel

    def matrices(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """(how many, rows, cols) of each kind of matrix in a parameter of this shape, as [out, in]."""
        rows, cols = self._sides(shape)
        count = math.prod(shape[: self.stacked(shape)])
        times, together = (self.repeats, 1) if self.apart else (1, self.repeats)
        if not self.sizes:
            return [(count, rows, cols)]
        parts = [size * together for size in self.sizes]
        return [(count * times, p, cols) if self.dim == "out" else (count * times, rows, p) for p in parts]

    def row_counts(self, shape: Sequence[int]) -> list[int]:
        """How many rows (outputs) the matrices of each kind have, all together, in one element of a stack."""
        return [count * rows for count, rows, _ in self.matrices(shape[self.stacked(shape) :])]

    def row_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a tensor with a number for each row of each matrix: behind the stack's dims, the rows of
        one kind of matrix behind those of another."""
        return (*shape[: self.stacked(shape)], sum(self.row_counts(shape)))

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Views of the tensor, one for each kind of matrix, in the order of `matrices`.

        tensor: [..., *shape]. Of a view, `as_matrices` makes [how many, rows, cols].
        """
        if self.kernel:
            tensor = tensor.flatten(-1 - self.kernel)
        if self.transposed:
            tensor = tensor.mT
        if not self.sizes:
            return [tensor]
        dim = -2 if self.dim == "out" else -1
        repeated = tensor.unflatten(dim, (self.repeats, sum(self.sizes)))
        return list(repeated.split(self.sizes, dim=dim))

    def as_matrices(self, part: Tensor) -> Tensor:
        """[how many, rows, cols] from a view of `parts`: a view, where it lies contiguously; else a copy."""
        if not self.sizes:
            return part.reshape(-1, *part.shape[-2:])
        if self.dim == "out":  # [..., repeats, size, cols]
            shape = part.shape[-2:] if self.apart else (part.shape[-3] * part.shape[-2], part.shape[-1])
            return part.reshape(-1, *shape)
        # [..., rows, repeats, size]
        part = part.movedim(-2, -3) if self.apart else part.flatten(-2)
        return part.reshape(-1, *part.shape[-2:])

    def write(self, part: Tensor, matrices: Tensor) -> None:
        """The way back from `as_matrices`, into the tensor that the view is of."""
        if self.sizes and self.dim == "in" and self.apart:
            part = part.movedim(-2, -3)
        part.copy_(matrices.reshape(part.shape))

    def _sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs of the last dims together."""
        rows = shape[-2 - self.kernel]
        cols = math.prod(shape[len(shape) - 1 - self.kernel :])
        return (cols, rows) if self.transposed else (rows, cols)


PLAIN = Structure()
