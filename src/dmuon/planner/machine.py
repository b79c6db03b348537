"""Machines: how fast their parts are by their makers' figures, and what a collective takes on their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from .model import PlanError


class Line(NamedTuple):
    """The ranks of one process group, as they stand on the machine.

    Attributes:
        size: how many.
        here: how many of them share a node.
    """

    size: int
    here: int


class Cost(NamedTuple):
    """Seconds of a collective: until its first byte has arrived, and of its bytes."""

    latency: float = 0.0
    transfer: float = 0.0


def together(costs: Sequence[Cost]) -> float:
    """Seconds of collectives of several queues: they wait at the same time, and share the links."""
    return max((cost.latency for cost in costs), default=0.0) + sum(cost.transfer for cost in costs)


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        name, source: what it is called, and where the figures are from.
        gpus: in a node.
        tflops: 1e12 operations a second of products in 16 bits.
        tflops32: in float32.
        memory: GiB of a GPU.
        memory_rate: 1e9 bytes a second, of a GPU's memory.
        inside, between: 1e9 bytes a second that one GPU sends, in a node and to other nodes.
        hop_inside, hop_between: microseconds from one rank of a ring to the next.
        launch: microseconds of any collective.
    """

    name: str
    source: str
    gpus: float
    tflops: float
    tflops32: float
    memory: float
    memory_rate: float
    inside: float
    between: float
    hop_inside: float = 3.4
    hop_between: float = 14.0
    launch: float = 8.4

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second of products."""
        return 1e12 * (self.tflops if dtype.itemsize == 2 else self.tflops32)

    def line(self, size: int, stride: int) -> Line:
        """`size` ranks, each `stride` further than the one before."""
        return Line(size, max(1, min(size, int(self.gpus) // stride)))

    def ring(self, line: Line, nbytes: float) -> Cost:
        """An all-gather or reduce-scatter, or the broadcasts or reductions of one launch: a chain each.

        nbytes: that a rank receives, or sends. A ring passes the nodes through the network cards of all its
        ranks there at once, as NCCL's do.
        """
        if line.size == 1 or not nbytes:
            return Cost()
        crossings = -(-line.size // line.here) - 1
        hops = crossings * self.hop_between + (line.size - 1 - crossings) * self.hop_inside
        rate = min(self.inside, self.between * line.here) if crossings else self.inside
        return Cost(1e-6 * (self.launch + hops), nbytes / (1e9 * rate))

    def all_reduce(self, line: Line, nbytes: float) -> Cost:
        """nbytes: of the buffer. A reduce-scatter and an all-gather."""
        latency, transfer = self.ring(line, 2 * nbytes * (line.size - 1) / line.size)
        return Cost(max(0.0, 2 * latency - 1e-6 * self.launch), transfer)

    def all_to_all(self, line: Line, nbytes: float) -> Cost:
        """nbytes: that a rank sends, alike to all. Each sends through its own card."""
        if line.size == 1 or not nbytes:
            return Cost()
        away = (line.size - line.here) / (line.size - 1)
        hop = self.hop_between if away else self.hop_inside
        seconds = max(away * nbytes / self.between, (1 - away) * nbytes / self.inside) / 1e9
        return Cost(1e-6 * (self.launch + hop), seconds)


_NVIDIA = "NVIDIA's data sheets of {} (dense products); latencies of NCCL's tuning table for rings"
MACHINES: Mapping[str, Machine] = {
    "a100-8": Machine("a100-8", _NVIDIA.format("A100 80GB SXM, DGX A100"), 8, 312, 19.5, 80, 2039, 300, 25),
    "h100-8": Machine("h100-8", _NVIDIA.format("H100 SXM, DGX H100"), 8, 989, 67, 80, 3350, 450, 50),
    "h200-8": Machine("h200-8", _NVIDIA.format("H200 SXM, DGX H200"), 8, 989, 67, 141, 4800, 450, 50),
    "b200-8": Machine("b200-8", _NVIDIA.format("DGX B200"), 8, 2250, 75, 180, 8000, 900, 50),
}
_VALUES = tuple(field.name for field in fields(Machine) if field.name not in ("name", "source"))


def machine_of(name: str, settings: Sequence[str] = ()) -> Machine:
    """A machine by name, with values given by hand: `tflops=700`.

    Raises:
        PlanError: for another name, or a value that is none.
    """
    if name not in MACHINES:
        raise PlanError(f"--machine {name}: known are {', '.join(MACHINES)}; --set changes their values")
    machine = MACHINES[name]
    for text in settings:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in _VALUES or not 0 < number < float("inf") or (key == "gpus" and number < 1):
            raise PlanError(
                f"--set {text}: write VALUE=NUMBER, a positive one; VALUE of {', '.join(_VALUES)}"
            )
        changed: dict[str, Any] = {key: number}
        machine = replace(machine, **changed, source=f"{machine.source}; {key} given")
    return machine
