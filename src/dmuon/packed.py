"""Gradients packed in one buffer, for a collective that sums them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .comm import packed_offsets


class PackedGradients:
    """This rank's gradients of several tensors in one buffer, zeros where it has none.

    Behind them, the buffer has one element per tensor that counts the ranks which had a gradient: the only
    way to tell "zero" from "none" once it has been summed.

    Attributes:
        buffer: what is to be summed.
        views: the gradients, parts of the buffer in the tensors' shapes.
        counts: [number of tensors], part of the buffer.
        had: whether this rank itself had each gradient.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor | None],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        divisor: float,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        offsets, total = packed_offsets(numels, dtype)
        self.buffer = torch.empty(total + len(shapes), dtype=dtype, device=device)
        self.views = [
            self.buffer[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(offsets, numels, shapes, strict=True)
        ]
        self.counts = self.buffer[total:]
        self.had = [gradient is not None for gradient in gradients]
        self._divisor = divisor
        pairs = [(view, grad) for view, grad in zip(self.views, gradients, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        self.counts.fill_(1)  # filled, not copied from a Python list: no transfer from the host
        for view, count, mine in zip(self.views, self.counts, self.had, strict=True):
            if not mine:
                view.zero_()
                count.zero_()
        if total > sum(numels):  # padding travels too; it must not be read uninitialised
            for offset, numel, end in zip(offsets, numels, [*offsets[1:], total], strict=True):
                self.buffer[offset + numel : end].zero_()
        # A sum of float16 overflows where a mean would not: there, divide before.
        self._divided = dtype == torch.float16
        if self._divided:
            self.buffer.div_(divisor)

    def average(self) -> None:
        """Make means of the sums, in place; the counts stay."""
        if not self._divided:
            self.buffer[: len(self.buffer) - len(self.counts)].div_(self._divisor)
            self._divided = True
