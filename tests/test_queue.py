"""Work that runs in order beside the computation."""

import contextlib
import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmuon.engine.queue import Queue

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PATIENCE = 30.0  # seconds


# On CPU: a worker thread


def test_work_runs_in_the_order_in_which_it_was_put_and_beside_the_caller():
    queue, seen, goes = Queue("test", CPU), [], threading.Event()
    queue.on_put = lambda phase, group: seen.append((phase, group))
    tickets = [queue.put("wait", "all", lambda: goes.wait(PATIENCE))]
    for number in range(5):
        tickets.append(queue.put("work", str(number), lambda n=number: seen.append(n) or n))
    assert seen == [("wait", "all"), *(("work", str(number)) for number in range(5))]  # none has run
    goes.set()
    assert tickets[3].wait() == 2
    assert tickets[0].wait() is True  # in any order
    assert [ticket.wait() for ticket in tickets[1:]] == list(range(5))
    assert tickets[3].wait() == 2  # again
    assert seen[6:] == list(range(5))


def state_inside() -> tuple[bool, bool, str]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), threading.current_thread().name


@pytest.mark.parametrize(("beside", "where"), [(True, "dmuon-test"), (False, "MainThread")])
def test_gradients_are_off_inside_whatever_the_caller_does(beside, where):
    queue = Queue("test", CPU, beside=beside)
    for around in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with around():
            assert queue.put("work", "it", state_inside).wait() == (False, False, where)


class Thing:
    """What work refers to; a tensor, say."""


@pytest.mark.parametrize("beside", [True, False])
def test_what_work_refers_to_stays_until_it_is_waited_for(beside):
    queue, thing = Queue("test", CPU, beside=beside), Thing()
    alive = weakref.ref(thing)
    ticket = queue.put("work", "it", lambda thing=thing: None)
    del thing
    queue.put("work", "another", gc.collect).wait()  # so the first is over
    assert alive() is not None
    ticket.wait()
    assert alive() is None


def test_who_has_waited_for_work_is_its_last_user():
    """The worker itself keeps nothing of what it has run: memory comes back at a known moment."""
    queue = Queue("test", CPU)
    for _ in range(200):
        thing = Thing()
        alive = weakref.ref(thing)
        ticket = queue.put("work", "it", lambda thing=thing: None)
        del thing
        ticket.wait()
        assert alive() is None


def fail_in_between(beside: bool) -> None:
    queue, ran = Queue("test", CPU, beside=beside), []

    def fail() -> None:
        raise ValueError("boom")

    before = queue.put("gather", "group 'a'", lambda: ran.append("before"))
    tickets = [queue.put("reduce", "group 'b'", fail)]  # raises nothing here
    tickets += [queue.put("exchange", f"group {name!r}", lambda: ran.append("after")) for name in "cd"]
    before.wait()
    names = ["the reduce of group 'b'", "the exchange of group 'c'", "the exchange of group 'd'"]
    for ticket, name in reversed(list(zip(tickets, names, strict=True))):
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=f"{name} failed on rank {dist.get_rank()}: boom"
            ) as raised:
                ticket.wait()
            assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(RuntimeError, match="the publish of group 'e' failed"):
        queue.put("publish", "group 'e'", lambda: ran.append("after")).wait()
    assert ran == ["before"]


@pytest.mark.parametrize("beside", [True, False])
def test_what_fails_comes_out_of_this_wait_and_of_all_later_ones(ranks, beside):
    ranks(1, fail_in_between, beside)


def test_the_worker_ends_when_nobody_has_the_queue():
    queue, ran = Queue("ending", CPU), []
    (worker,) = [thread for thread in threading.enumerate() if thread.name == "dmuon-ending"]
    queue.put("work", "it", lambda: time.sleep(0.05))
    queue.put("work", "it", lambda: ran.append(True))
    del queue
    worker.join(PATIENCE)
    assert not worker.is_alive()
    assert ran == [True]  # not before all is done


def test_what_is_in_a_queue_is_over_before_the_process_ends():
    code = """
import time, torch
from dmuon.engine.queue import Queue
Queue.kept = queue = Queue("test", torch.device("cpu"))
queue.put("work", "it", lambda: time.sleep(0.1))
queue.put("work", "it", lambda: print("over", flush=True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_inline_work_has_run_when_put_returns():
    before, seen = threading.active_count(), []
    queue = Queue("inline", CPU, beside=False)
    queue.on_put = lambda phase, group: seen.append(phase)
    ticket = queue.put("work", "it", lambda: seen.append(threading.current_thread()) or "result")
    assert seen == ["work", threading.current_thread()]
    assert threading.active_count() == before
    assert ticket.wait() == "result"


# On CUDA: a stream, of which this is a stand-in


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event {self.log.count(f'{self.name} records')} of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Device:
    """What `torch.get_device_module` answers."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream("main", self.log)

    def Stream(self, device: torch.device, priority: int) -> Stream:
        return Stream(f"side{priority}", self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.log.append(f"{name} on {self.current.name}, {state_inside()[:2]}")
            return name

        return run


@pytest.fixture
def device(monkeypatch: Any) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    return device


def test_a_stream_runs_work_after_the_computation_and_the_computation_after_the_work(device):
    queue = Queue("test", CUDA)
    first = queue.put("work", "it", device.work("first"))
    issued = [
        "side0 waits for main",
        "first on side0, (False, False)",
        "side0 records",
    ]
    assert device.log == issued  # and the host goes on
    with torch.inference_mode():
        second = queue.put("work", "it", device.work("second"))
    assert device.log[3:] == [line.replace("first", "second") for line in issued]
    assert second.wait() == "second"
    with device.stream(Stream("another", device.log)):
        assert first.wait() == "first"
    assert device.log[6:] == ["main waits for event 2 of side0", "another waits for event 1 of side0"]


def test_urgent_work_has_a_stream_of_higher_priority(device):
    Queue("test", CUDA, urgent=True).put("work", "it", device.work("it"))
    assert device.log[0] == "side-1 waits for main"


def test_a_stream_keeps_what_work_refers_to_until_it_is_waited_for(device):
    queue, buffer = Queue("test", CUDA), torch.zeros(3)
    alive = weakref.ref(buffer)
    ticket = queue.put("work", "it", lambda buffer=buffer: buffer.numel())
    del buffer
    gc.collect()
    assert alive() is not None  # its kernels may not have run yet
    ticket.wait()
    assert alive() is None


def test_what_work_lets_go_of_stays_until_a_stream_is_waited_for(device):
    def run(held: list[torch.Tensor], queue: Queue) -> None:
        queue.let_go(held.pop())

    for place, stays in ((CUDA, True), (torch.device("cpu"), False)):
        queue, held = Queue("test", place), [torch.zeros(3)]
        alive = weakref.ref(held[0])
        ticket = queue.put("work", "it", functools.partial(run, held, queue))
        if not stays:
            queue.put("work", "it", lambda: None).wait()  # the first has run
        gc.collect()
        assert (alive() is not None) == stays
        ticket.wait()
        assert alive() is None


def fail_on_a_stream() -> None:
    device = Device()
    real, torch.get_device_module = torch.get_device_module, lambda kind: device
    try:
        queue = Queue("test", CUDA)
        ticket = queue.put("reduce", "it", lambda: 1 / 0)
        later = queue.put("reduce", "another", device.work("later"))
    finally:
        torch.get_device_module = real
    for each, name in ((later, "another"), (ticket, "it")):
        with pytest.raises(RuntimeError, match=f"the reduce of {name} failed on rank 0: division"):
            each.wait()
    assert not any("later on" in line for line in device.log)
    assert device.current.name == "main"


def test_what_fails_under_a_stream_comes_out_of_a_wait(ranks):
    ranks(1, fail_on_a_stream)
