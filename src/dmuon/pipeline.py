"""Operations of several stages, each a collective, taken forward together and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from .comm import Pending, SideStream

T = TypeVar("T")
Stages = Generator[Pending, None, T]  # yields the collective of each stage, returns what comes of it


class Operation(Generic[T]):
    """One operation under way. Starting it issues the collective of its first stage.

    number: operations of one pipeline are numbered in the order in which they were started.
    """

    def __init__(self, stages: Stages[T], number: int) -> None:
        self.number = number
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

    side: where there is one, all stages but the first run there.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._operations: deque[Operation[T]] = deque()  # all, until their results are fetched
        # Those not known to be done, by stage, so that a poll asks only the first of each. One that has been
        # advanced by others than us is ahead of its queue.
        self._queues: list[deque[Operation[T]]] = []
        self._started = 0

    def start(self, stages: Stages[T]) -> Operation[T]:
        """Start an operation: its first collective is issued now."""
        operation = Operation(stages, self._started)
        self._started += 1
        self._operations.append(operation)
        self._enqueue(operation, 0)
        return operation

    def _enqueue(self, operation: Operation[T], stage: int) -> None:
        if stage == len(self._queues):
            self._queues.append(deque())
        if not operation.done:
            self._queues[stage].append(operation)

    def poll(self) -> None:
        """Take operations to their next stages as far as that needs no waiting; on a side stream, which does
        the waiting, to their ends."""
        if self._side is None:
            self._advance(Operation.is_ready)
        elif any(self._queues):
            with self._side.ahead():
                self._advance(lambda operation: True)

    def _advance(self, may_go_on: Callable[[Operation[T]], bool]) -> None:
        """A stage of each in turn, so that they overlap; the first that may not go on holds up the rest."""
        for stage, queue in enumerate(self._queues):  # which grow on the way
            while queue and may_go_on(queue[0]):
                operation = queue[0]
                if operation.stage == stage and not operation.done:
                    operation.advance()
                queue.popleft()
                self._enqueue(operation, stage + 1)

    def finish(self, last: Operation[T] | None = None) -> list[T]:
        """Wait for all operations, or for those up to `last`; what they returned, in order."""
        if self._side is not None:
            self.poll()
            self._side.join()
        until = self._started if last is None else last.number
        self._advance(lambda operation: operation.number <= until)
        results = []
        while self._operations and self._operations[0].number <= until:
            results.append(self._operations.popleft().result)
        return results

    def clear(self) -> None:
        """Forget all operations."""
        self._operations.clear()
        self._queues.clear()
