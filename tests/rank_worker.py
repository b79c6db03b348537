"""The process behind one rank of `ranks`: wait for a call, run it in a fresh process group, answer, leave."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

STORE_TIMEOUT = timedelta(seconds=30)


@dataclass
class Outcome:
    """What a rank sends back: a value, or the text that says how it failed."""

    value: Any = None
    failure: str | None = None


def work(rank: int, connection: Connection, port: int, log: Path, stack: Path) -> None:
    """Serve calls until the other end of the connection closes.

    Standard output and standard error go to the file `log`; on SIGUSR1, the stacks of all threads go to the
    file `stack`.
    """
    redirect_output(log)
    stack_file = stack.open("w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills us
    threading.Thread(target=watch_parent, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_TIMEOUT)
    gc.freeze()  # torch's own objects: they need no look at each collection
    connection.send_bytes(pickle.dumps(Outcome()))
    with contextlib.suppress(EOFError):
        while True:
            call, world_size, group_timeout, fresh, payload = pickle.loads(connection.recv_bytes())
            group = {
                "store": dist.PrefixStore(call, store),
                "rank": rank,
                "world_size": world_size,
                "timeout": timedelta(seconds=group_timeout),
            }
            if fresh:
                leave()
            answer, failed = run(group, payload)
            connection.send_bytes(answer)
            if failed:
                time.sleep(0.5)  # so that this failure is known before those that follow from it
                os._exit(1)  # as a script would: the others see its connections close
            connection.recv_bytes()  # every rank has answered
            gc.collect()


def run(group: dict[str, Any], payload: bytes) -> tuple[bytes, bool]:
    """Run the pickled call in a new process group made with the options `group`.

    Returns the pickled Outcome, and whether the call has failed.
    """
    try:
        fn, args, kwargs = pickle.loads(payload)
        if not dist.is_initialized():
            dist.init_process_group("gloo", **group)
        settle()
        return pickle.dumps(Outcome(value=portable(fn(*args, **kwargs)))), False
    except BaseException as error:  # pytest's own failures are no Exceptions
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        return pickle.dumps(Outcome(failure="raised\n" + "".join(traceback.format_exception(error)))), True
    finally:
        sys.stdout.flush()


def settle() -> None:
    """The state that every call finds, whatever the call before left."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)


def leave() -> None:
    """Destroy the process group and forget what torch remembers of it.

    DTensor's caches would hand out meshes of an earlier call to a later one: equal meshes are one key to
    them, but the process groups behind the earlier mesh are gone.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_meshes()
    gc.collect()


def forget_meshes() -> None:
    """Clear DTensor's caches, which hand out an earlier mesh for a later one of the same ranks and names."""
    from torch.distributed.tensor import _redistribute, debug

    caches = [
        getattr(debug, "_clear_sharding_prop_cache", None),  # the names differ between versions of torch
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        _redistribute._gen_transform_infos.cache_clear,
    ]
    for clear in caches:
        if clear is not None:
            clear()


def portable(result: Any) -> Any:
    """`result` with each tensor as a detached CPU copy that owns its storage.

    Raises TypeError for a DTensor, which means nothing in another process.
    """
    return tree_map(portable_leaf, result)


def portable_leaf(leaf: Any) -> Any:
    if type(leaf).__name__ == "DTensor":
        raise TypeError("the function returned a DTensor: return its to_local() or its full value")
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf


def redirect_output(log: Path) -> None:
    """Let all that this process prints, from Python or from C++, go to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def watch_parent() -> None:
    """End this process when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
