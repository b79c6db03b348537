"""Operations of several stages, each a collective, taken forward together and in order."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

from .comm import Pending

T = TypeVar("T")
Stages = Generator[Pending, None, T]  # yields the collective of each stage, returns what comes of it


class Operation(Generic[T]):
    """One operation under way. Starting it issues the collective of its first stage."""

    def __init__(self, stages: Stages[T]) -> None:
        self.stage = -1
        self.done = False
        self._result: T | None = None
        self._stages = stages
        self._pending: Pending | None = None
        self.advance()

    @property
    def result(self) -> T:
        """What the stages have returned, once they are done."""
        assert self.done
        return self._result  # type: ignore[return-value]

    def is_ready(self) -> bool:
        """Whether `advance` would not have to wait."""
        return self._pending is None or self._pending.is_completed()

    def advance(self) -> None:
        """Wait for the collective of this stage and start the next one."""
        if self._pending is not None:
            self._pending.wait()
        try:
            self._pending = next(self._stages)
        except StopIteration as end:
            self.done, self._result, self._pending = True, end.value, None
        self.stage += 1


class Pipeline(Generic[T]):
    """Operations in the order in which they were started.

    No operation enters a stage before all earlier ones have: so every channel sees the same order on all its
    ranks, although they learn at different times that a stage is over. Operations of one pipeline use one
    channel a stage; a rank that has no part in a stage passes it with a `Pending` that is nothing.
    """

    def __init__(self) -> None:
        self._operations: list[Operation[T]] = []

    def start(self, stages: Stages[T]) -> Operation[T]:
        """Start an operation: its first collective is issued now."""
        operation = Operation(stages)
        self._operations.append(operation)
        return operation

    def poll(self) -> None:
        """Take operations to their next stages as far as that needs no waiting."""
        limit = float("inf")
        for operation in self._operations:
            while not operation.done and operation.stage < limit and operation.is_ready():
                operation.advance()
            if not operation.done:
                limit = operation.stage

    def finish(self, last: Operation[T] | None = None) -> list[T]:
        """Wait for all operations, or for those up to `last`; what they returned, in order."""
        count = len(self._operations)
        if last is not None:
            count = self._operations.index(last) + 1 if last in self._operations else 0
        due = self._operations[:count]
        while any(not operation.done for operation in due):
            for operation in due:  # a stage of each in turn, so that they overlap
                if not operation.done:
                    operation.advance()
        del self._operations[:count]
        return [operation.result for operation in due]

    def clear(self) -> None:
        """Forget all operations."""
        self._operations.clear()
