"""The cost of set-up and bookkeeping: linear in the number of matrices, small on thousands of ranks.

Counted, not timed: bytecode instructions that ours run, and torch's calls.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import dmuon
import layouts
from dmuon.planner.registry import from_registry
from rank_worker import forget_meshes

TESTS = Path(__file__).parent
DEPTHS = (2, 4, 8)  # layers, of four matrices each


# By the number of matrices


def instructions_of(action: Callable[[], object]) -> int:
    """Bytecode instructions that dmuon's files run in a call: loops count by what they do."""
    ours = str(Path(dmuon.__file__).parent)
    count = 0

    def trace(frame, event, arg):
        path = frame.f_code.co_filename
        if not path.startswith(ours):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return trace_ours

    def trace_ours(frame, event, arg):
        nonlocal count
        count += event == "opcode"
        return trace_ours

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def calls_of(action: Callable[[], object]) -> int:
    """Python functions that are called, torch's included."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def bookkeeping(sizes: dict[str, int]) -> dict[str, list[int]]:
    """By phase, the instructions for models of DEPTHS."""
    counts: dict[str, list[int]] = {}

    def note(phase: str, action: Callable[[], object]) -> None:
        counts.setdefault(phase, []).append(instructions_of(action))

    for depth in DEPTHS:
        model = layouts.Model(depth=depth)
        optimizers, losses = [], []
        note("set-up", lambda model=model, out=optimizers: out.append(layouts.build(model, sizes)))
        (optimizer,) = optimizers
        note("forward", lambda model=model, out=losses: out.append(layouts.loss_of(model, 0)))
        note("backward", losses[0].backward)
        note("clip", lambda model=model: dmuon.clip_grad_norm_(model, 1.0))
        if "tp" not in sizes:  # the fake group refuses an all_to_all to which this rank gives nothing
            note("step", optimizer.step)
            note("state_dict", lambda model=model, opt=optimizer: (model.state_dict(), opt.state_dict()))
        note("zero_grad", optimizer.zero_grad)
    return counts


def one_group(sizes: dict[str, int]) -> dict[str, list[int]]:
    """`bookkeeping` where all matrices are in one group: fully_shard wraps nothing but the root."""

    def shard(model, mesh, **kwargs):
        layouts.fully_shard(model, mesh=mesh["dp"], **kwargs)

    with mock.patch.object(layouts, "shard", shard):
        return bookkeeping(sizes)


def first_step(sizes: dict[str, int]) -> dict[str, list[int]]:
    """Calls in the first step, in which torch plans each operation on DTensors."""
    counts = []
    for depth in DEPTHS:
        model = layouts.Model(depth=2 * depth)  # several lists of base parameters
        optimizer = layouts.build(model, sizes)
        layouts.loss_of(model, 0).backward()
        counts.append(calls_of(optimizer.step))
    return {"first step": counts}


CALLS = [
    (first_step, {"dp": 4}),  # the first of all, before torch has planned anything
    (bookkeeping, {"dp": 4}),
    (bookkeeping, {"replicate": 2, "shard": 2}),
    (bookkeeping, {"ddp": 4}),
    (bookkeeping, {"dp": 2, "tp": 2}),
    (one_group, {"dp": 4}),
]


def count_all() -> dict[str, list[int]]:
    """What CALLS count, each in a fake process group of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = {}
    for call, sizes in CALLS:
        dist.init_process_group("fake", rank=0, world_size=math.prod(sizes.values()), store=FakeStore())
        found |= {f"{call.__name__} of {sizes}, {phase}": seen for phase, seen in call(sizes).items()}
        dist.destroy_process_group()
        forget_meshes()
    return found


def test_twice_the_matrices_cost_twice_as_much():
    code = "import json, test_scale; print(json.dumps(test_scale.count_all()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 20
    for phase, (first, second, third) in found.items():
        # What is the same at every depth drops out. 2 is linear, 4 is quadratic.
        assert third - second <= 2.15 * (second - first), f"{phase}: {first}, {second}, {third}"


@pytest.mark.parametrize("mesh", ["replicate=16,shard=256", "replicate=8,shard=64,tp=8"])
def test_llama_3_8b_is_set_up_on_meta_for_one_of_4096_ranks(mesh):
    command = [sys.executable, str(TESTS.parent / "benchmarks" / "scale.py"), "--large", mesh]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    published = from_registry("llama-3-8b")
    assert seen["ranks"] == 4096
    assert seen["numel"] == published.numel
    assert seen["matrices"] == len(published.dedicated)
    assert seen["all_on_meta"]
    assert seen["peak_mib"] < 2048
