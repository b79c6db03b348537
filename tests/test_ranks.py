"""The harness itself: answers, failures, hangs and deaths, and that the next call works after each."""

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranks import Ranks, RanksFailed


def rank_and_sum(offset: int, *, scale: int = 1) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() * scale + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def pids() -> int:
    return os.getpid()


def assert_usable(ranks: Ranks) -> None:
    assert ranks(4, rank_and_sum, 0) == [(rank, 4, 6) for rank in range(4)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(ranks: Ranks, world_size: int) -> None:
    total = sum(10 * rank + 1 for rank in range(world_size))
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert ranks(world_size, rank_and_sum, 1, scale=10) == expected


@pytest.mark.parametrize("world_size", [0, 5])
def test_impossible_world_sizes_are_refused(ranks: Ranks, world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        ranks(world_size, pids)


def test_local_functions_are_refused(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="module-level"):
        ranks(1, lambda: None)


def test_processes_stay_between_calls(ranks: Ranks) -> None:
    before = ranks(4, pids)
    assert len(set(before)) == 4
    assert ranks(4, pids) == before
    assert ranks(2, pids) == before[:2]


def random_numbers() -> tuple[torch.Tensor, torch.dtype, int]:
    found = torch.rand(3), torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    return found


def test_every_call_finds_the_same_state(ranks: Ranks) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for numbers, dtype, threads in ranks(2, random_numbers):
            assert torch.equal(numbers, expected)
            assert dtype == torch.float32
            assert threads == 1


def tensors() -> dict[str, Any]:
    big = torch.zeros(1_000_000)
    weight = torch.nn.Parameter(torch.full((2, 3), 1.5, dtype=torch.bfloat16))
    return {"view": big[:2], "nested": [(weight, weight * 2)], "rank": dist.get_rank()}


def test_tensors_come_back_as_small_detached_copies(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks(2, tensors)):
        assert result["rank"] == rank
        assert result["view"].untyped_storage().nbytes() == 8
        weight, double = result["nested"][0]
        assert not weight.requires_grad
        assert torch.equal(weight, torch.full((2, 3), 1.5, dtype=torch.bfloat16))
        assert torch.equal(double, 2 * weight)


def returns_dtensor() -> torch.Tensor:
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_dtensors_do_not_come_back(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="returned a DTensor"):
        ranks(2, returns_dtensor)


def gather_product(extra_mesh: bool) -> list[float]:
    if extra_mesh:  # its groups come first, so the names of those of the second mesh differ between the calls
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    doubled = sharded * 2
    assert doubled.device_mesh is mesh  # not one that was cached by an earlier call
    return doubled.redistribute(mesh, [Replicate()]).to_local().tolist()


def test_meshes_of_an_earlier_world_are_forgotten(ranks: Ranks) -> None:
    for extra_mesh in (True, False, True):
        assert ranks(4, gather_product, extra_mesh, fresh=True) == [[0.0, 2.0, 4.0, 6.0]] * 4


def fails_on(*failing: int) -> int:
    if dist.get_rank() in failing:
        raise ValueError(f"bad value on {dist.get_rank()}")
    return dist.get_rank()


def test_each_failing_rank_is_shown(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks(4, fails_on, 1, 2)
    text = str(caught.value)
    assert sorted(caught.value.failed) == [1, 2]
    for rank in (1, 2):
        section = text.split(f"[rank {rank}] raised\n")[1].split("\n\n")[0]
        assert "in fails_on" in section
        assert f"ValueError: bad value on {rank}" in section
    assert "[rank 0]" not in text
    assert_usable(ranks)


def expects_an_error() -> None:
    with pytest.raises(ValueError, match="never"):
        dist.barrier()


def test_a_failure_of_pytest_is_a_failure(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="DID NOT RAISE"):
        ranks(2, expects_an_error)


def fails_before_collective() -> None:
    if dist.get_rank() == 2:
        raise ValueError("no collective from me")
    dist.all_reduce(torch.ones(1))


def test_ranks_that_wait_for_one_that_failed_fail_as_well(ranks: Ranks) -> None:
    assert_usable(ranks)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(4, fails_before_collective)
    assert time.monotonic() - start < 25  # the collective would give up after 60 s
    text = str(caught.value)
    assert caught.value.failed[0] == 2
    assert sorted(caught.value.failed) == [0, 1, 2, 3]
    assert text.index("[rank 2] raised") < min(text.index(f"[rank {rank}]") for rank in (0, 1, 3))
    assert "ValueError: no collective from me" in text
    assert_usable(ranks)


def sleeps_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def test_a_hang_is_reported_with_its_stack(ranks: Ranks) -> None:
    assert_usable(ranks)
    with pytest.raises(RanksFailed) as caught:
        ranks(4, sleeps_on, 3, timeout=2.0)
    assert caught.value.failed == [3]
    assert "[rank 3] has not answered after 2 s" in str(caught.value)
    assert "in sleeps_on" in str(caught.value)
    assert "in watch_parent" not in str(caught.value)
    assert_usable(ranks)


def skips_collective(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))


def test_collectives_give_up_after_the_group_timeout(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"raised\n(?s:.*)in skips_collective"):
        ranks(2, skips_collective, 1, group_timeout=2.0)
    assert time.monotonic() - start < 25


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_writes_no_stack_is_reported_too(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)has not answered after 2 s.*did not even write its stack"):
        ranks(1, stops, timeout=2.0)
    assert_usable(ranks)


def dies(how: str) -> None:
    if dist.get_rank() == 1:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "cause"), [("exit", "exit code 7"), ("kill", r"exit code -9 \(SIGKILL\)")])
def test_a_dead_rank_is_reported_with_its_exit_code(ranks: Ranks, how: str, cause: str) -> None:
    with pytest.raises(RanksFailed, match=rf"\[rank 1\] died with {cause}") as caught:
        ranks(2, dies, how)
    assert caught.value.failed == [1]
    assert_usable(ranks)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_died_between_calls_is_replaced(ranks: Ranks) -> None:
    victim = ranks(4, pids)[3]
    os.kill(victim, signal.SIGKILL)
    while exists(victim):
        time.sleep(0.05)
    assert_usable(ranks)


def speaks() -> None:
    print("to stdout")
    warnings.warn("to stderr", stacklevel=1)


def test_output_is_shown_with_its_rank(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(2, rank_and_sum, 0)
    assert capfd.readouterr() == ("", "")  # gloo keeps quiet
    ranks(2, speaks)
    out, err = capfd.readouterr()
    for rank in (0, 1):
        section = out.split(f"[rank {rank}] wrote:\n")[1].split("[rank ")[0]
        assert section.startswith("to stdout\n")
        assert "UserWarning: to stderr" in section
    assert err == ""


def test_interrupting_the_test_ends_the_ranks() -> None:
    pool = Ranks()
    workers = pool(2, pids)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 10.0)  # again, where a callback of the collector swallowed it
    try:
        with pytest.raises(KeyboardInterrupt):
            pool(2, sleeps_on, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert not any(exists(pid) for pid in workers)
