"""How much memory tensors take, at rest and at most, by following every storage that an operator touches.

A `Ledger` is opened before a model is built, so it knows all storages that the model, its optimizer and their
iterations ever have. It follows storages and not allocations, because FSDP2 and dmuon resize storages in
place, and because gloo's threads let go of some tensors, which torch's memory profiler does not see.

Not in it: what an operator's kernel allocates and frees inside itself, what compiled code allocates, gloo's
own buffers, Python's objects.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WRAPPERS = (DTensor, AsyncCollectiveTensor)  # they become operators on ordinary tensors first


class Ledger(TorchDispatchMode):
    """Follows the storages of this thread's operators while its `with` block runs.

    Attributes:
        rest: bytes held when `window` began.
        peak: most bytes held inside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rest = self.peak = 0
        self._sizes: dict[int, int] = {}  # bytes of a storage when it was last looked at
        self._storages: dict[int, StorageWeakRef] = {}  # as long as they stay, no address is used again
        self._bound = 0  # the sum of `_sizes`: what is held cannot be more
        self._watching = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten((args, kwargs, out))[0]:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._look_at(tensor.untyped_storage())
        if self._watching and self._bound > self.peak:
            self.peak = max(self.peak, self._held())
        return out

    def _look_at(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage)
        self._bound += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _held(self) -> int:
        """Bytes of all storages that are alive, exactly."""
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key], self._sizes[key]
            else:
                self._sizes[key] = storage.nbytes()
        self._bound = sum(self._sizes.values())
        return self._bound

    @contextmanager
    def window(self) -> Iterator[None]:
        """The part of the block whose peak is wanted."""
        gc.collect()  # what is garbage already is not at rest
        self.rest = self.peak = self._held()
        self._watching = True
        yield
        self._watching = False
