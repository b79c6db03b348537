"""What all ranks of a model say, and errors that all of them raise where one has a reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .parameter import DedicatedParam

T = TypeVar("T")


def ranks_of(params: Iterable[DedicatedParam]) -> DeviceMesh:
    """A mesh of all the ranks that share these parameters."""
    return max((param.mesh for param in params), key=lambda mesh: mesh.ndim)


def gather_objects(mesh: DeviceMesh, value: T) -> list[T]:
    """What each rank of a mesh gives, in the same order on all; collective over them. Anything that can be
    pickled, and small."""
    values = [value]
    for group in mesh.get_all_groups():
        parts: list[list[T]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def raise_together(mesh: DeviceMesh, error: Exception | None) -> None:
    """Raise on all ranks of a mesh what one of them has found; collective over them.

    Those that went on would wait for the one that does not.
    """
    if (first := next(filter(None, gather_objects(mesh, error)), None)) is not None:
        raise first
