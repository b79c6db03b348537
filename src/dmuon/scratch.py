"""Buffers in which an exchange is packed, kept for the next one where that is wanted."""

from __future__ import annotations

import torch


class Scratch:
    """A pool of flat buffers.

    Without `reuse` every buffer is new, and goes back to the allocator when it has been used. With it, the
    buffers stay: as many, and as large, as have been in use at one time.
    """

    def __init__(self, reuse: bool) -> None:
        self.reuse = reuse
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of `numel` elements, uninitialised."""
        fits = [b for b in self._free if b.dtype == dtype and b.device == device and b.numel() >= numel]
        with torch.inference_mode(False):  # what an evaluation takes, training may use next
            if not fits:
                return torch.empty(numel, dtype=dtype, device=device)
            best = min(fits, key=torch.Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best[:numel]

    def give_back(self, *buffers: torch.Tensor) -> None:
        """Say that buffers from `take` are no longer in use, not by a collective either."""
        if self.reuse:
            self._free += [b if b._base is None else b._base for b in buffers]
