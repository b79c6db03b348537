"""Timing in rounds, in each of which every contestant has one turn.

A machine that gets slower or faster meanwhile does so for all of them, and ratios are taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from contestant import Contestant
from control import Control

T = TypeVar("T")


@dataclass
class Turn:
    """What is timed once a round, and its readings: a list a round, in seconds, of this rank."""

    run: Callable[[], list[float]]
    readings: list[list[float]] = field(default_factory=list)
    error: str = ""


def time_contestant(
    contestant: Contestant, iterations: int, steps: int, control: Control
) -> Callable[[], list[float]]:
    """A turn with the readings [iteration, step, settled, step, settled, ...].

    - iteration: `iterations` of zero_grad, forward, backward and step one after the other, and the wait for
      what the last step has started, divided by their number;
    - step: `step()` alone, when every rank's gradients are there, `steps` times;
    - settled: the same until what it has started is over as well.

    The ranks meet before each; batches are made before them.
    """

    def run() -> list[float]:
        batches = contestant.batches(iterations)
        control.barrier()
        begin = time.perf_counter()
        for batch in batches:
            contestant.iterate(batch)
        contestant.finish()
        readings = [(time.perf_counter() - begin) / iterations]
        for batch in contestant.batches(steps):
            contestant.gradients(batch)
            control.barrier()
            begin = time.perf_counter()
            contestant.optimizer.step()
            stepped = time.perf_counter()
            contestant.finish()
            readings += [stepped - begin, time.perf_counter() - begin]
        return readings

    return run


def time_newton_schulz(loop: Callable[[], None], steps: int, control: Control) -> Callable[[], list[float]]:
    """A turn with as many readings as `steps`, of a step's orthogonalizations alone."""

    def run() -> list[float]:
        readings = []
        for _ in range(steps):
            control.barrier()
            begin = time.perf_counter()
            loop()
            readings.append(time.perf_counter() - begin)
        return readings

    return run


def in_order(turns: Sequence[T], number: int) -> Iterator[T]:
    """All turns, starting with another one in every round, backwards in every other."""
    start = number % len(turns)
    rotated = [*turns[start:], *turns[:start]]
    return iter(rotated if number % 2 == 0 else rotated[::-1])


def play(turns: Sequence[Turn], rounds: int, control: Control, say: Callable[[int], None]) -> None:
    """All rounds; a turn that fails has an `error` then and is left out of the rounds that follow.

    After it, the readings are those of the slowest rank, one by one. `say` is told each round's number.
    """
    for number in range(rounds):
        say(number)
        for turn in in_order(turns, number) if turns else ():
            if turn.error:
                continue
            readings, turn.error = control.attempt(turn.run)
            turn.readings.append(readings or [])
    for turn in turns:
        turn.readings = [] if turn.error else control.slowest(turn.readings)
