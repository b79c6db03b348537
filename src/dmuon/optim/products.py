"""Matrix products with a symmetric result, which are half to two thirds of Newton-Schulz.

A library's general product computes such a result twice. What does better depends on the machine:

- "full" is torch's product, for batches of any size, on every device.
- "panels" computes the lower triangle in panels of rows, each up to its diagonal block, with torch's product,
  and mirrors it: (p + 1) / 2p of the operations for p panels. It pays where a panel is large enough to keep
  the library at its full speed.
- "quack" is the symmetric product of `quack-kernels` (https://github.com/Dao-AILab/quack), for NVIDIA GPUs
  from Hopper on, in bfloat16 and float16; install dmuon's extra "quack".
- "triton" is a kernel of ours for other GPUs, in bfloat16 and float16. "auto" does not take it: nobody has
  measured yet where it pays (`benchmarks/gpu.py` does).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Backend = Literal["auto", "full", "panels", "quack", "triton"]

_PANEL_BYTES = 512  # of a panel's column and thread: below 128 rows of float32, products lose their speed
_MOST_PANELS = 8  # more save little: the operations are 9/16 then, and tend to 1/2
_BATCH_ELEMENTS = {"cpu": 2**21, "cuda": 2**24}


class SymmetricProduct(Protocol):
    """Computes ``alpha a b + beta plus``, known to be symmetric."""

    def __call__(
        self, a: Tensor, b: Tensor, *, out: Tensor, plus: Tensor | None = None, alpha: float, beta: float
    ) -> Tensor:
        """Write it to ``out`` and return that.

        a: (batch, m, k); b: (batch, k, m); out and plus: (batch, m, m), contiguous. ``out`` is none of the
        others. ``beta`` is ignored without ``plus``.
        """


def multiply_add(plus: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float, out: Tensor) -> Tensor:
    """Write ``alpha a b + beta plus`` to ``out``, symmetric or not.

    a: (batch, m, k); b: (batch, k, n); plus and out: (batch, m, n), contiguous and not the same.
    """
    if _is_single(out):
        torch.addmm(plus[0], a[0], b[0], beta=beta, alpha=alpha, out=out[0])
        return out
    return torch.baddbmm(plus, a, b, beta=beta, alpha=alpha, out=out)


def _is_single(batch: Tensor) -> bool:
    """Whether the product of two matrices is the better one: on CPU, threads share out a batch by matrix."""
    return len(batch) == 1 and batch.device.type == "cpu"


def check_backend(backend: object) -> Backend:
    """`backend` if it is one.

    Raises:
        ValueError: with the names of those that are.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"ns_backend must be one of {get_args(Backend)}, got {backend!r}")
    return backend  # type: ignore[return-value]


def check_available(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a kernel that cannot be had.

    Raises:
        RuntimeError: with the reason.
    """
    if backend in _KERNELS and (reason := _why_not(backend, dtype, device)) is not None:
        raise RuntimeError(f'ns_backend="{backend}" cannot be used: {reason}. Take "auto" or "full"')


def symmetric_product(
    backend: Backend, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> SymmetricProduct:
    """The product to use for Gram matrices of ``rows`` x ``cols`` matrices, and for polynomials in them.

    "auto" takes quack on the GPUs that it is made for, where it is installed and right; on CPU panels, from
    the size on where they pay; otherwise full products. Full products stand in for quack's where a side is
    no multiple of 16 bytes, which it does not take.

    Raises:
        RuntimeError: if "quack" or "triton" is asked for and cannot be had.
    """
    check_available(backend, dtype, device)
    if backend == "triton":
        return _triton
    if backend == "quack" or (backend == "auto" and _has_quack(dtype, device)):
        aligned = all(side * dtype.itemsize % 16 == 0 for side in (rows, cols))
        return _quack if aligned else _full
    side = min(rows, cols)
    height = panel_height(side, dtype)
    if backend == "panels" or (backend == "auto" and device.type == "cpu" and side >= 2 * height):
        return functools.partial(_panels, height=min(height, side))
    return _full


def backend_name(backend: Backend, dtype: torch.dtype, device: torch.device) -> str:
    """What `symmetric_product` takes on this device, in words."""
    if backend != "auto":
        return backend
    if _has_quack(dtype, device):
        return "quack"
    return f"panels from {2 * _smallest_panel(dtype)} rows on, else full" if device.type == "cpu" else "full"


def panel_height(side: int, dtype: torch.dtype) -> int:
    """Rows of a panel for a result of ``side`` x ``side`` on CPU: large enough for all threads."""
    return max(_smallest_panel(dtype), 16 * -(-side // (16 * _MOST_PANELS)))


def matrices_at_once(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many matrices of one shape it pays to orthogonalize in one batch; at least 1.

    On CPU, small ones: the library runs a batch on all threads, each matrix on one, where a single small
    product leaves threads idle and its call costs as much as the arithmetic. Larger ones fill the machine
    alone, and would only need more memory. On CUDA, as long as the batch is of moderate size.
    """
    if device.type == "cpu" and min(rows, cols) >= 2 * _smallest_panel(dtype):
        return 1
    return max(1, _BATCH_ELEMENTS.get(device.type, 1) // max(1, rows * cols))


def _smallest_panel(dtype: torch.dtype) -> int:
    return max(128, _PANEL_BYTES // dtype.itemsize) * torch.get_num_threads()


def _full(
    a: Tensor, b: Tensor, *, out: Tensor, plus: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    if plus is not None:
        return multiply_add(plus, a, b, alpha=alpha, beta=beta, out=out)
    if _is_single(out):
        torch.mm(a[0], b[0], out=out[0])
    else:
        torch.bmm(a, b, out=out)
    return out if alpha == 1.0 else out.mul_(alpha)


def _panels(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor,
    plus: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    height: int,
) -> Tensor:
    batch, side, _ = out.shape
    for matrix in range(batch):
        left, right, result = a[matrix], b[matrix], out[matrix]
        for start in range(0, side, height):
            rows, cols = slice(start, start + height), slice(0, start + height)
            panel = result[rows, cols]
            if plus is None:
                torch.mm(left[rows], right[:, cols], out=panel)
                if alpha != 1.0:
                    panel.mul_(alpha)
            else:
                torch.addmm(
                    plus[matrix][rows, cols], left[rows], right[:, cols], beta=beta, alpha=alpha, out=panel
                )
            # In two steps: a transposed copy between strided blocks takes up to three times as long.
            result[:start, rows] = result[rows, :start].contiguous().mT.contiguous()
    return out


def _quack(
    a: Tensor, b: Tensor, *, out: Tensor, plus: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    # It compiles a kernel for each of beta's kinds, used or not: one is enough.
    _gemm_symmetric()(a, b, C=plus, out=out, alpha=alpha, beta=1.0 if plus is None else beta)
    return out


def _gemm_symmetric() -> Callable[..., object]:
    from quack.gemm_interface import gemm_symmetric

    return gemm_symmetric


def _triton(
    a: Tensor, b: Tensor, *, out: Tensor, plus: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    from .triton_product import symmetric_product

    return symmetric_product(a, b, out=out, plus=plus, alpha=alpha, beta=beta)


_KERNELS: Mapping[str, SymmetricProduct] = MappingProxyType({"quack": _quack, "triton": _triton})


def _has_quack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether "auto" takes quack's product; the package is asked for nothing that it does not do."""
    return device.type == "cuda" and dtype.itemsize == 2 and _why_not("quack", dtype, device) is None


@functools.cache
def _why_not(kernel: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a kernel cannot be used there; None if it can.

    Kernels are compiled for the device at their first use, by packages that have a release every few weeks
    or months: so one is used only after it has given a right product here.
    """
    if kernel == "quack":
        if device.type != "cuda" or torch.version.cuda is None:
            return "it needs an NVIDIA GPU"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "it needs a GPU of the Hopper generation or newer"
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no products in {dtype}"
    try:
        wrong = _error_of(_KERNELS[kernel], dtype, device)
    except Exception as error:  # a missing package, a compiler, a driver: whatever it is, we can do without
        reason = f"it fails here with {type(error).__name__}: {error}"
    else:
        if wrong < 0.02:
            return None
        reason = f"it gives wrong products here (off by {wrong:.2g})"
    logger.info("symmetric products of %s are not used: %s", kernel, reason)
    return reason


def _error_of(product: SymmetricProduct, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of the products that Newton-Schulz needs, on the device.

    All of them, of wide and of tall matrices: each may be a kernel of its own, and in the middle of a step it
    is too late to find that one fails.
    """
    wide = torch.linspace(-1, 1, 2 * 384 * 640, device=device).sin().view(2, 384, 640).to(dtype)
    errors = []
    for a in (wide, wide.mT.contiguous().mT):
        gram = torch.bmm(a, a.mT)
        for plus, alpha, beta in ((None, 1.0, 0.0), (gram, 1.0, -1.5), (gram, 0.5, -1.5)):
            out = product(a, a.mT, out=torch.empty_like(gram), plus=plus, alpha=alpha, beta=beta)
            expected = alpha * torch.bmm(a.float(), a.float().mT)
            if plus is not None:
                expected += beta * plus.float()
            errors.append(((out.float() - expected).abs().max() / expected.abs().max()).item())
    return max(errors)
