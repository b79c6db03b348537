"""Work that runs in order beside the computation: a CUDA stream, or on CPU a worker thread.

What is put into a queue is straight-line code: pack, one collective after the other, unpack. Collectives
inside are synchronous, which on CUDA means that they run on the queue's own stream, and on CPU that they
block the worker. So both devices run the same functions in the same order, and the order in which all ranks
*put* their work is the order in which they issue their collectives.

On CUDA `put` issues the kernels at once, behind all that the computation has been given so far, and the host
goes on. A buffer that both sides use is kept by its ticket until the computation has waited for it: then the
allocator may give it to whatever comes next on the stream of the computation. That is why nothing here calls
`record_stream`, whose memory comes back only when the host happens to look.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

T = TypeVar("T")
Listener = Callable[[str, str], None]  # phase, group

_SECONDS_AT_EXIT = 30.0  # for what is still in a queue, whose other ranks may be gone


class Ticket(Generic[T]):
    """One piece of work in a queue; it keeps all that the work refers to until it is waited for.

    Whoever puts work waits for it before dropping its ticket; else the computation waits when it is dropped.
    """

    def __init__(self, owner: Queue, phase: str, group: str, work: Callable[[], T]) -> None:
        self._queue = owner
        self._phase = phase
        self._group = group
        self._work: Callable[[], T] | None = work
        self._kept: list[torch.Tensor | None] = []  # what the work has let go of
        self._result: T | None = None
        self._failure: BaseException | None = None
        self._done = threading.Lock()  # held until the work has run (CPU) or has been issued (CUDA)
        self._done.acquire()
        self._event: Any = None  # CUDA: when the work is over on the device

    def __del__(self) -> None:
        """Dropped without a wait, as by a model that goes: what the work refers to still outlives it."""
        if getattr(self, "_event", None) is not None and self._work is not None:
            self._queue.current_stream().wait_event(self._event)

    def wait(self) -> T:
        """Make the computation wait: the host on CPU, the current stream on CUDA. Returns what came of it.

        Raises:
            RuntimeError: if the work, or some work before it in the queue, has failed here; it names phase
                and group.
        """
        with self._done:
            pass
        if self._event is not None:
            self._queue.current_stream().wait_event(self._event)
        self._work = None
        self._kept.clear()
        if self._failure is not None:
            raise RuntimeError(
                f"dmuon: the {self._phase} of {self._group} failed on rank {dist.get_rank()}: {self._failure}"
            ) from self._failure
        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        """Called by the queue, in its thread or under its stream. What is raised is kept for `wait`."""
        self._failure = self._queue._failure
        if self._failure is None:
            assert self._work is not None
            # A range costs microseconds even if nobody records it.
            profiled = torch.autograd._profiler_enabled()
            name = f"dmuon::{self._phase} {self._group}" if profiled else ""
            try:
                with record_function(name) if profiled else contextlib.nullcontext():
                    self._result = self._work()
            except BaseException as error:
                # Other ranks may wait in a collective that this one has not reached, so that nothing behind
                # it would meet its partner: the queue runs nothing more.
                self._failure = self._queue._failure = error


class Queue:
    """Runs what is put into it one after the other, beside the computation.

    Args:
        name: for threads and messages.
        device: where the tensors are.
        beside: False runs the work of a CPU at once, in the caller's thread: for process groups that are
            shared with others, whose collectives must be issued in the order of the program. Streams do so in
            any case.
        urgent: its kernels go before those of others (a CUDA stream of high priority).

    Attributes:
        on_put: called with phase and group whenever work is put.
    """

    def __init__(self, name: str, device: torch.device, *, beside: bool = True, urgent: bool = False) -> None:
        self.on_put: Listener | None = None
        self._failure: BaseException | None = None
        self._device = device
        self._stream: Any = None
        self._waiting: queue.SimpleQueue[Ticket | None] | None = None
        self._issuing: Ticket | None = None  # CUDA
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device, priority=-1 if urgent else 0)
        elif beside:
            self._waiting = queue.SimpleQueue()
            # The thread knows only what waits, so that it ends when the queue is gone. A daemon: a collective
            # that hangs must not keep the process alive.
            worker = threading.Thread(target=_serve, args=(self._waiting,), name=f"dmuon-{name}", daemon=True)
            worker.start()
            weakref.finalize(self, _end, self._waiting, worker)

    def put(self, phase: str, group: str, work: Callable[[], T]) -> Ticket[T]:
        """Run `work` after all that was put before, and on CUDA after all that the computation has so far."""
        ticket = Ticket(self, phase, group, work)
        if self.on_put is not None:
            self.on_put(phase, group)
        if self._waiting is not None:
            self._waiting.put(ticket)
        elif self._stream is None:
            with torch.inference_mode(False), torch.no_grad():
                ticket._run()
            ticket._done.release()
        else:
            self._stream.wait_stream(self.current_stream())
            self._issuing = ticket
            with self._module.stream(self._stream), torch.inference_mode(False), torch.no_grad():
                ticket._run()
            self._issuing = None
            ticket._event = self._stream.record_event()
            ticket._done.release()
        return ticket

    def let_go(self, *tensors: torch.Tensor | None) -> None:
        """Say, inside some work, that it will not use tensors of the computation any more.

        On CPU, whoever drops them then has their memory. On CUDA the kernels that read them have only been
        issued: the ticket keeps them until the computation has waited for it.
        """
        if self._issuing is not None:
            self._issuing._kept += tensors

    def current_stream(self) -> Any:
        """The stream of the computation, on CUDA."""
        return self._module.current_stream(self._device)


def _end(waiting: queue.SimpleQueue[Ticket | None], worker: threading.Thread) -> None:
    """When the queue is gone, or the process ends: a thread that comes back from a collective while the
    interpreter is being taken down would abort the process."""
    waiting.put(None)
    if worker is not threading.current_thread():
        worker.join(_SECONDS_AT_EXIT)


def _serve(waiting: queue.SimpleQueue[Ticket | None]) -> None:
    """The worker thread."""
    torch.set_grad_enabled(False)  # of this thread
    while (ticket := waiting.get()) is not None:
        ticket._run()
        done = ticket._done
        del (
            ticket
        )  # before anyone is told: who has waited for the last user of a buffer may count on its memory
        done.release()
