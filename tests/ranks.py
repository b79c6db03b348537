"""Run a function on several ranks and get every rank's answer, or every rank's failure.

The ranks are processes that start once and stay: importing torch costs seconds, a call costs milliseconds.
Tests reach them through the session fixture `ranks` (see conftest.py):

    def summed(x: torch.Tensor) -> torch.Tensor:      # at module level: it is pickled by reference
        dist.all_reduce(x)
        return x

    def test_summed(ranks):
        assert ranks(4, summed, torch.ones(2))[0].tolist() == [4.0, 4.0]

What a rank prints is printed by the test as well, so pytest shows it when the test fails. A failure of any
kind (an exception, a hang, a dead process) throws the processes away; the next call starts new ones.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rank_worker import Outcome, work

MAX_RANKS = 4
START_TIMEOUT = 240.0  # seconds for the processes to import torch and report
GRACE = 3.0  # seconds that the others get after the first failure
LAST_WORDS = 3.0  # seconds that a hanging rank gets to write its stack, and a dead one to show its exit code

# Imported once, before the processes are forked. Not the package itself: ranks import what the tests import.
PRELOAD = [
    "pytest",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]
# Read by torch's import and by gloo: quiet, one core per rank, and no look-up of the host's name.
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
if sys.platform == "linux":
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


class RanksFailed(AssertionError):
    """At least one rank raised, hung or died. The message has a section for each such rank.

    `failed` holds these ranks, the first to fail first.
    """

    def __init__(self, title: str, failures: dict[int, str]) -> None:
        self.failed = list(failures)
        sections = [f"[rank {rank}] {text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n\n".join([title, *sections]))


CALLS_A_WORLD = 20  # then a new process group: each mesh leaves some behind, with threads and open files


@dataclass
class Worker:
    """One process and our end of the pipe to it."""

    rank: int
    process: BaseProcess
    connection: Connection
    log: Path
    stack: Path
    log_read: int = 0  # bytes of the log that were printed already

    def new_output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_read)
            output = file.read()
        self.log_read += len(output)
        return output.decode(errors="replace")

    def cause_of_death(self) -> str:
        self.process.join(LAST_WORDS)
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return f"died with exit code {code}{name}"


class Ranks:
    """A pool of up to four ranks; call it to run a function on the first `world_size` of them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0
        self._world = (0, 0.0, 0)  # of the process group that is up: its size, its timeout, calls so far

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 120.0,
        group_timeout: float = 60.0,
        grace: float = GRACE,
        fresh: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Return [fn(*args, **kwargs) on rank 0, on rank 1, ...].

        On each rank a gloo process group of `world_size` is up, whose collectives give up after
        `group_timeout` seconds, and torch's seed is 0. Tensors in the result come back as detached copies on
        the CPU; a DTensor in the result is an error. After the first failure the others get `grace` seconds.
        Calls of one size share a process group, and with it what torch and dmuon keep for it; `fresh` makes a
        new one.

        Raises RanksFailed when a rank raises, dies, or has not answered after `timeout` seconds.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be 1..{MAX_RANKS}, got {world_size}")
        name = getattr(fn, "__qualname__", repr(fn))
        if "<" in name:
            raise TypeError(f"{name} must be a module-level function: the ranks import it by its name")
        payload = pickle.dumps((fn, args, kwargs))

        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self._workers:
            self._start()
        self._calls += 1
        workers = self._workers[:world_size]
        size, same_timeout, calls = self._world
        fresh = fresh or size != world_size or same_timeout != group_timeout or calls >= CALLS_A_WORLD
        self._world = (world_size, group_timeout, 1 if fresh else calls + 1)
        message = pickle.dumps((str(self._calls), world_size, group_timeout, fresh, payload))
        try:
            for worker in workers:
                worker.connection.send_bytes(message)
            answers, failures = collect(workers, timeout, grace)
        except BaseException:  # Ctrl-C, or a test's timeout: nobody will read what the ranks answer
            self.close()
            raise
        for worker in workers:
            if output := worker.new_output():
                print(f"[rank {worker.rank}] wrote:\n{output}", end="")
        if failures:
            self.close()
            raise RanksFailed(f"{name} failed on {len(failures)} of {world_size} ranks", failures)
        for worker in workers:
            worker.connection.send_bytes(
                b"leave"
            )  # not earlier: a rank that left looks dead to those still busy
        return [answers[worker.rank] for worker in workers]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        if self._workers:
            self._directory.cleanup()
        self._workers = []
        self._world = (0, 0.0, 0)

    def _start(self) -> None:
        if self._store is None:  # kept in this process, so that no rank's death takes it away
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        directory = Path(self._directory.name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with environment(ENVIRONMENT):
            for rank in range(MAX_RANKS):
                log, stack = directory / f"{rank}.log", directory / f"{rank}.stack"
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=work, args=(rank, theirs, self._store.port, log, stack), daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append(Worker(rank, process, ours, log, stack))
        try:
            _, failures = collect(self._workers, START_TIMEOUT)
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise RanksFailed("the ranks did not start", failures)


def collect(
    workers: list[Worker], timeout: float, grace: float = GRACE
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for one answer from each worker: results by rank, and failures by rank in order of arrival."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = {worker.connection: worker for worker in workers}
    late = f"has not answered after {timeout:g} s"
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(pending), left):
            worker = pending.pop(connection)  # type: ignore[call-overload]
            try:
                outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                outcome = Outcome(failure=worker.cause_of_death())
            if outcome.failure is None:
                answers[worker.rank] = outcome.value
                continue
            if not failures and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                late = f"was still busy {grace:g} s after the first failure"
            failures[worker.rank] = outcome.failure
    for rank, stack in stacks(list(pending.values())).items():
        failures[rank] = f"{late}. It was here:\n{stack}"
    return answers, failures


def stacks(workers: list[Worker]) -> dict[int, str]:
    """What each of these workers is doing, by rank; they write it in a signal handler, even inside C code."""
    for worker in workers:
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + LAST_WORDS
    texts: dict[int, str] = {}
    while workers and time.monotonic() < deadline:
        time.sleep(0.1)
        before, texts = texts, {worker.rank: worker.stack.read_text() for worker in workers}
        if texts == before and all(texts.values()):  # complete: nothing more came
            break
    return {rank: main_stacks(text) or "(it did not even write its stack)" for rank, text in texts.items()}


def main_stacks(dump: str) -> str:
    """The threads of a faulthandler dump, without the one that watches the parent process."""
    threads = dump.strip().split("\n\n")
    return "\n\n".join(thread for thread in threads if "in watch_parent" not in thread)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
