"""Where several tensors lie in one flat buffer: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT_BYTES = 16  # vectorized loads, and what the kernels behind matrix products like

Key = tuple


class Packing:
    """Tensors one behind the other, so that those with one key, or one beginning of it, are one span.

    The key says who a tensor goes to: (shard,) or (shard, replicate), say. Spans of a beginning follow each
    other without gaps: what goes to a row, or to one rank of it, is one slice of the buffer.

    Args:
        keys: of each tensor, ascending, all of one length.
        numels: of each tensor.
        dtype: of the buffer; tensors begin at multiples of 16 bytes.
        counts: whether each key's span ends with one more element for each of its tensors.

    Attributes:
        offsets: where each tensor begins, in elements.
        counts: where each tensor's extra element is; empty without them.
        total: length of the buffer.
    """

    def __init__(
        self, keys: Sequence[Key], numels: Sequence[int], dtype: torch.dtype, *, counts: bool = False
    ) -> None:
        assert list(keys) == sorted(keys)
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        self.dtype = dtype
        self.numels = tuple(numels)
        self.offsets: list[int] = []
        self.counts: list[int] = []
        self.total = 0
        self._spans: dict[Key, tuple[int, int]] = {}
        begin = 0
        for index, (key, numel) in enumerate(zip(keys, numels, strict=True)):
            self.offsets.append(self.total)
            self.total += -(-numel // step) * step
            is_last = index + 1 == len(keys) or keys[index + 1] != key
            if counts and is_last:
                self.counts += range(self.total, self.total + index + 1 - begin)
                self.total += -(-(index + 1 - begin) // step) * step
            if is_last:
                start = self.offsets[begin]
                for length in range(len(key) + 1):
                    first, _ = self._spans.get(key[:length], (start, start))
                    self._spans[key[:length]] = (first, self.total)
                begin = index + 1
        self._children: dict[Key, list[tuple[Any, slice]]] = {}
        for key, (start, stop) in self._spans.items():
            if key:
                self._children.setdefault(key[:-1], []).append((key[-1], slice(start, stop)))

    def span(self, *key: object) -> slice:
        """Of all tensors whose keys begin with `key`; empty if there is none."""
        return slice(*self._spans.get(key, (0, 0)))

    def parts(self, *key: object) -> list[tuple[Any, slice]]:
        """What `key`'s span consists of: the next element of each key, and where in it its span is."""
        base = self.span(*key).start
        return [(k, slice(s.start - base, s.stop - base)) for k, s in self._children.get(key, ())]

    def views(self, buffer: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """One view of a buffer of `total` elements per tensor, in the tensors' shapes."""
        return [
            buffer[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(self.offsets, self.numels, shapes, strict=True)
        ]
