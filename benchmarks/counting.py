"""How many collectives a rank takes part in, and how many bytes it moves in them.

`Collectives` watches torch's operators, below every way to issue a collective (torch.distributed's functions,
FSDP2, DTensor) and above the backend, so that all are counted alike.

A rank's bytes are the payload that it has to receive or to send, whatever a backend's algorithm makes of it,
in a group of N ranks:

    broadcast, scatter           the buffer, on all ranks but the source
    reduce, gather               the buffer, on all ranks but the target
    all-gather, reduce-scatter   (N - 1) / N of the long buffer
    all-reduce                   2 (N - 1) / N of the buffer
    all-to-all                   what is sent to others
    send, receive                the buffer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dmuon.engine.runtime import find_runtime, has_runtime

Arguments = Mapping[str, Any]
NAMESPACES = ("c10d", "_c10d_functional")
NO_COLLECTIVE = {"barrier", "monitored_barrier_", "wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}


def size(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list of (lists of) them."""
    return sum(t.numel() * t.element_size() for t in tree_flatten(tensors)[0] if isinstance(t, torch.Tensor))


def rooted(tensors: str, root: str) -> Callable[[Arguments, dist.ProcessGroup], int]:
    """A collective with a source or a target: it moves each other rank's buffer."""
    return lambda a, group: 0 if group.rank() == a[root] else size(a[tensors])


def in_parts(buffer: str) -> Callable[[Arguments, dist.ProcessGroup], int]:
    """A collective that puts together, or cuts, a long buffer of equal parts."""
    return lambda a, group: size(a[buffer]) * (group.size() - 1) // group.size()


def per_rank(buffer: str) -> Callable[[Arguments, dist.ProcessGroup], int]:
    """The same, by its short buffer."""
    return lambda a, group: size(a[buffer]) * (group.size() - 1)


def summed(buffer: str) -> Callable[[Arguments, dist.ProcessGroup], int]:
    """An all-reduce."""
    return lambda a, group: 2 * size(a[buffer]) * (group.size() - 1) // group.size()


def exchanged(splits: str) -> Callable[[Arguments, dist.ProcessGroup], int]:
    """An all-to-all of consecutive parts; no splits mean equal parts."""

    def moved(a: Arguments, group: dist.ProcessGroup) -> int:
        sent, rows = a["input"], a["input"].shape[0]
        mine = a[splits][group.rank()] if a[splits] else rows // group.size()
        return size(sent) * (rows - mine) // rows if rows else 0

    return moved


def listed(a: Arguments, group: dist.ProcessGroup) -> int:
    """An all-to-all of one tensor per rank."""
    return size(a["input_tensors"]) - size(a["input_tensors"][group.rank()])


def whole(a: Arguments, group: dist.ProcessGroup) -> int:
    """A message from one rank to another."""
    return size(a["tensors"])


BYTES: dict[str, Callable[[Arguments, dist.ProcessGroup], int]] = {
    "c10d.broadcast_": rooted("tensors", "root_rank"),
    "c10d.reduce_": rooted("tensors", "root_rank"),
    "c10d.gather_": rooted("input_tensors", "root_rank"),
    "c10d.scatter_": rooted("output_tensors", "root_rank"),
    "c10d.allreduce_": summed("tensors"),
    "c10d.allreduce_coalesced_": summed("tensors"),
    "c10d.allgather_": per_rank("input_tensors"),
    "c10d.allgather_coalesced_": per_rank("input_list"),
    "c10d._allgather_base_": per_rank("input_tensor"),
    "c10d.allgather_into_tensor_coalesced_": per_rank("inputs"),
    "c10d.reduce_scatter_": per_rank("output_tensors"),
    "c10d._reduce_scatter_base_": per_rank("output_tensor"),
    "c10d.reduce_scatter_tensor_coalesced_": per_rank("outputs"),
    "c10d.alltoall_base_": exchanged("input_split_sizes"),
    "c10d.alltoall_": listed,
    "c10d.send": whole,
    "c10d.recv_": whole,
    "c10d.recv_any_source_": whole,
    "_c10d_functional.broadcast": rooted("input", "src"),
    "_c10d_functional.broadcast_": rooted("input", "src"),
    "_c10d_functional.all_reduce": summed("input"),
    "_c10d_functional.all_reduce_": summed("input"),
    "_c10d_functional.all_reduce_coalesced": summed("inputs"),
    "_c10d_functional.all_reduce_coalesced_": summed("inputs"),
    "_c10d_functional.all_gather_into_tensor": per_rank("input"),
    "_c10d_functional.all_gather_into_tensor_out": per_rank("input"),
    "_c10d_functional.all_gather_into_tensor_coalesced": per_rank("inputs"),
    "_c10d_functional.reduce_scatter_tensor": in_parts("input"),
    "_c10d_functional.reduce_scatter_tensor_out": in_parts("input"),
    "_c10d_functional.reduce_scatter_tensor_coalesced": in_parts("inputs"),
    "_c10d_functional.all_to_all_single": exchanged("input_split_sizes"),
}


class Collectives(TorchDispatchMode):
    """Counts the collectives that this thread issues while the `with` block runs, by operator.

    Those of dmuon are issued by threads of its own, which no mode sees: of a `model` with dedicated
    parameters, its own counts are added, as "dmuon.PHASE". What is in flight at the end is not waited for.

    `unknown` has the operators whose bytes no rule here tells; they are counted with none.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._traffic = find_runtime(model).traffic if model is not None and has_runtime(model) else None
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def __enter__(self) -> Collectives:
        if self._traffic is not None:
            self._before = Counter(self._traffic.collectives), Counter(self._traffic.bytes)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._traffic is not None:
            now = Counter(self._traffic.collectives), Counter(self._traffic.bytes)
            for mine, after, before in zip((self.calls, self.bytes), now, self._before, strict=True):
                mine.update({f"dmuon.{phase}": count for phase, count in (after - before).items()})

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on ordinary tensors first, and collectives
        if func.namespace in NAMESPACES and func._opname not in NO_COLLECTIVE:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Arguments) -> None:
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        name = f"{func.namespace}.{func._opname}"
        self.calls[name] += 1
        if name in BYTES:
            self.bytes[name] += BYTES[name](arguments, group_of(arguments))
        else:
            self.unknown.add(name)


def group_of(arguments: Arguments) -> dist.ProcessGroup:
    """The process group of a collective's operator."""
    group = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
    if isinstance(group, str):
        return _resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
