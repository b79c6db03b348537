"""When each collective of a model begins and ends, on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn as nn

from .engine.runtime import find_runtime


@dataclass(frozen=True)
class Interval:
    """One collective, from when this rank came to it to when it was over here; in ns since the epoch.

    Attributes:
        phase: "gather", "reduce", "reduce_replicas", "sum_copies", "exchange", "publish_exchange" or
            "publish".
        label: the group; the same in all phases.
    """

    phase: str
    label: str
    begin: int
    end: int


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[list[Interval]]:
    """Record the collectives issued for a model inside the `with` block, in the order of their ends.

    One that is in flight when the block ends is not recorded.

    Raises:
        ValueError: if the model is not on the CPU, or has no dedicated parameters.
        RuntimeError: before the optimizer has been built.
    """
    runtime = find_runtime(model)
    if runtime.layout.device.type != "cpu":
        raise ValueError(
            f"the model is on {runtime.layout.device}: there, torch.profiler shows the kernels of each "
            "collective under its name"
        )
    if not runtime.is_sealed:
        raise RuntimeError("there are no collectives to record yet: build dmuon.Muon first")
    intervals: list[Interval] = []
    traffic, before = runtime.traffic, runtime.traffic.listener
    traffic.listener = lambda *values: intervals.append(Interval(*values))
    try:
        yield intervals
    finally:
        traffic.listener = before
