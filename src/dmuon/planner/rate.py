"""How fast this machine multiplies matrices: a rate for time estimates, if no other is given."""

from __future__ import annotations

import time

import torch

_SIDE = 1024
_SECONDS = 0.3


def measure(dtype: torch.dtype = torch.float32) -> float:
    """Operations a second of square products on the CPU, after one to warm up; takes about 0.3 s."""
    x = torch.ones(_SIDE, _SIDE, dtype=dtype)
    out = torch.empty_like(x)
    torch.mm(x, x, out=out)
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _SECONDS or not count:
        torch.mm(x, x, out=out)
        count += 1
    return 2 * _SIDE**3 * count / elapsed
