"""What the ranks of a benchmark do together beside the measured work."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from peer import first_line

T = TypeVar("T")


def own_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """A mesh with process groups of its own: what fails on one may leave them useless for all others."""
    names = tuple(sizes)
    return init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=names, backend_override=dict.fromkeys(names, "gloo")
    )


class Control:
    """Barriers, agreement about failures and sums over all ranks, in a process group of its own.

    Its patience is longer than that of other groups: when one rank fails, those that wait for it in a
    collective fail as well, and all meet here.
    """

    def __init__(self, patience: timedelta) -> None:
        self._group = dist.new_group(timeout=patience, backend="gloo")

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """Do something on every rank; returns its result here, and, if any rank failed, why the first did."""
        value, error = None, ""
        try:
            value = action()
        except (Exception, SystemExit) as problem:  # a peer's code: whatever it does, the others run
            error = first_line(problem)
        errors = self.gather((time.time(), error))
        failed = sorted((when, rank, text) for rank, (when, text) in enumerate(errors) if text)
        if not failed:
            return value, ""
        _, rank, cause = failed[0]  # what failed later may have waited for it
        everywhere = all(text == cause for _, text in errors)
        return None, cause if everywhere else f"{cause} (on rank {rank})"

    def gather(self, value: T) -> list[T]:
        """Every rank's value."""
        values: list[T] = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def slowest(self, seconds: list[list[float]]) -> list[list[float]]:
        """The largest of all ranks' values, one by one."""
        table = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        return table.tolist()
