"""When each collective of a model begins and ends, on CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
import torch.nn as nn

from .runtime import find_runtime


@dataclass(frozen=True)
class Interval:
    """One collective, from when this rank issued it to when it was over here; in ns since the epoch.

    Attributes:
        phase: "gather", "reduce", "reduce_replicas", "sum_copies", "exchange", "publish_exchange", "publish"
            or "base".
        label: what was moved, by group and owner; the same in all phases.
    """

    phase: str
    label: str
    begin: int
    end: int


@contextlib.contextmanager
def record(model: nn.Module) -> Iterator[list[Interval]]:
    """Record the collectives issued for a model inside the `with` block, in the order of their ends.

    One that is in flight when the block ends is added to the list when it is over. (An interval of torch's
    profiler must not be open when the profile ends, which that of an asynchronous publish usually is.)

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
    before, runtime.traffic.on_issue = runtime.traffic.on_issue, follow(intervals)
    try:
        yield intervals
    finally:
        runtime.traffic.on_issue = before


def follow(intervals: list[Interval]) -> Callable[[str, str, int, dist.Work], None]:
    """To be called when a collective is issued; adds it to `intervals` when it is over."""

    def issued(phase: str, label: str, begin: int, work: dist.Work) -> None:
        def over(_: object) -> None:  # in a thread of gloo, before it says that the work is completed
            intervals.append(Interval(phase, label, begin, time.time_ns()))

        work.get_future().add_done_callback(over)

    return issued
