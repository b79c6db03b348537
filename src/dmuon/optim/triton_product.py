"""A product with a symmetric result as a Triton kernel: half of the blocks are computed, the others mirrored.

For NVIDIA and AMD GPUs, in bfloat16 and float16. torch's builds for GPUs bring Triton along; importing this
module needs it. Kernels of this kind for Muon are known from K. Jordan's modded-nanogpt.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# One setting for all shapes. Triton could look for the best by timing, but then two ranks that orthogonalize
# copies of one matrix might settle on different ones, and round differently.
_BLOCK = 128  # rows and columns of a block of the result
_DEPTH = 64  # of the sum, at a time
_LAUNCH = {"num_warps": 8, "num_stages": 3}


def symmetric_product(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    plus: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    block: int = _BLOCK,
    depth: int = _DEPTH,
) -> Tensor:
    """Write ``alpha a b + beta plus``, known to be symmetric, to ``out`` and return that.

    a: (batch, m, k); b: (batch, k, m), with any strides; out and plus: (batch, m, m), contiguous, and ``out``
    none of the others. Sums are in float32. ``block`` and ``depth``, powers of two from 16 on, are the
    kernel's blocks.
    """
    batch, side, _ = out.shape
    blocks = triton.cdiv(side, block)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _kernel[(batch * blocks * blocks,)](  # in one dimension, the only one with room for any batch
            a,
            b,
            out if plus is None else plus,
            out,
            side,
            a.shape[-1],
            blocks,
            *a.stride(),
            *b.stride(),
            alpha,
            beta,
            has_plus=plus is not None,
            block=block,
            step=depth,
            **_LAUNCH,
        )
    return out


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    plus,
    out,
    side,
    depth,
    blocks,
    a_matrix,
    a_row,
    a_col,
    b_matrix,
    b_row,
    b_col,
    alpha,
    beta,
    has_plus: tl.constexpr,
    block: tl.constexpr,
    step: tl.constexpr,
):
    """One block of the lower triangle of one matrix, and its mirror image."""
    place = tl.program_id(0)
    matrix, i, j = place // (blocks * blocks), place // blocks % blocks, place % blocks
    if j > i:
        return
    matrix = matrix.to(tl.int64)  # 64 bits: a batch may have more than 2^31 elements
    rows = (i * block + tl.arange(0, block)).to(tl.int64)
    cols = (j * block + tl.arange(0, block)).to(tl.int64)
    inner = tl.arange(0, step)
    has_row, has_col = rows < side, cols < side

    left_at = a + matrix * a_matrix + rows[:, None] * a_row + inner[None, :] * a_col
    right_at = b + matrix * b_matrix + inner[:, None] * b_row + cols[None, :] * b_col
    total = tl.zeros((block, block), dtype=tl.float32)
    for start in range(0, depth, step):
        has_inner = inner < depth - start
        left = tl.load(left_at, mask=has_row[:, None] & has_inner[None, :], other=0.0)
        right = tl.load(right_at, mask=has_inner[:, None] & has_col[None, :], other=0.0)
        total = tl.dot(left, right, total)
        left_at += step * a_col
        right_at += step * b_row
    total *= alpha

    inside = has_row[:, None] & has_col[None, :]
    first = matrix * side * side
    at = first + rows[:, None] * side + cols[None, :]
    if has_plus:
        total += beta * tl.load(plus + at, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if j < i:
        mirrored = first + cols[:, None] * side + rows[None, :]
        tl.store(out + mirrored, tl.trans(result), mask=has_col[:, None] & has_row[None, :])
