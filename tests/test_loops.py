"""Random training loops equal the single-process oracle, on every layout."""

import pytest

from loop_runner import run_loops
from loops import (
    LAYOUTS,
    Clip,
    Evaluate,
    Forward,
    Freeze,
    Load,
    Micro,
    Pair,
    Schedule,
    Step,
    Write,
    ZeroGrad,
    by_layout,
    loop_of,
    world_size_of,
)
from ranks import Ranks

# Of each layout the first seeds. `make soak` goes on.
COUNTS = {1: 3, 2: 3, 4: 2}
CHOSEN = [(size, seeds[: COUNTS[size]]) for size, seeds in by_layout(range(800))]
SEEDS = [seed for _, seeds in CHOSEN for seed in seeds]
BATCHES = [
    pytest.param(size, seeds, id="-".join(f"{dim}{n}" for dim, n in loop_of(seeds[0]).sizes.items()))
    for size, seeds in CHOSEN
]


@pytest.mark.parametrize(("world_size", "seeds"), BATCHES)
def test_random_loops(ranks: Ranks, world_size: int, seeds: list[int]) -> None:
    ranks(world_size, run_loops, seeds, timeout=240)


def test_a_seed_is_one_loop() -> None:
    assert loop_of(3) == loop_of(3) != loop_of(13)
    assert all(world_size_of(seed) == loop_of(seed).world_size for seed in SEEDS)
    assert "uses=" in str(loop_of(3))


def test_the_loops_have_everything() -> None:
    """Each layout, and each kind of action."""
    assert len(SEEDS) == len(set(SEEDS))
    loops = [loop_of(seed) for seed in SEEDS]
    assert {str(loop.sizes) for loop in loops} == {str(s) for sizes in LAYOUTS.values() for s in sizes}
    actions = [action for loop in loops for action in loop.actions]
    kinds = (Micro, Pair, Evaluate, Forward, Clip, ZeroGrad, Step, Freeze, Schedule, Write, Load)
    assert {type(action) for action in actions} == set(kinds)
    micros = [action for action in actions if isinstance(action, Micro)]
    ways = {"sync", "no_sync", "nested", "gradient_sync", "all_reduce", "keep"}
    assert {micro.sync for micro in micros} == ways
    assert {micro.recompute for micro in micros} == {"no", "not_reentrant", "reentrant"}
    assert {action.way for action in actions if isinstance(action, Load)} == {"full", "dcp", "native"}
