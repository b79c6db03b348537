"""Buffers of exchanges, kept or not."""

from typing import Any

import pytest
import torch

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.scratch import Scratch
from layouts import Model, distribute, loss_of
from models import full_weights

pytestmark = pytest.mark.always("True-False")

CPU = torch.device("cpu")


def test_a_buffer_is_used_again():
    scratch = Scratch(reuse=True)
    first = scratch.take(10, torch.float32, CPU)
    second = scratch.take(10, torch.float32, CPU)
    assert first.data_ptr() != second.data_ptr()  # both in use
    scratch.give_back(first, second)
    smaller = scratch.take(4, torch.float32, CPU)
    assert len(smaller) == 4
    assert smaller.data_ptr() in (first.data_ptr(), second.data_ptr())
    scratch.give_back(smaller)
    again = {scratch.take(10, torch.float32, CPU).data_ptr() for _ in range(2)}
    assert again == {first.data_ptr(), second.data_ptr()}  # whole again
    assert scratch.take(10, torch.float64, CPU).dtype == torch.float64


def test_a_buffer_from_an_evaluation_serves_training():
    scratch = Scratch(reuse=True)
    for numel in (10, 4):  # a new one, and a part of it
        with torch.inference_mode():
            scratch.give_back(scratch.take(numel, torch.float32, CPU))
        buffer = scratch.take(10, torch.float32, CPU).fill_(1)
        scratch.give_back(buffer)


def test_without_reuse_nothing_is_kept():
    scratch = Scratch(reuse=False)
    scratch.give_back(scratch.take(10, torch.float32, CPU))
    assert not scratch._free


Pools = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # of either way: addresses and sizes


def train(reuse: Any, gram: bool) -> tuple[Pools, Pools, dict[str, torch.Tensor]]:
    """What is kept after the last step but one, and after the last; the weights."""
    torch.manual_seed(1)
    model = Model()
    distribute(model, {"dp": 2, "tp": 2}, tp_buffer_reuse=reuse)
    optimizer = dmuon.Muon(model, tp_distributed_gram=gram, tp_distributed_gram_policy="always")
    pools = find_runtime(model).groups[0]._scratch
    kept = []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        kept.append(tuple(sorted((b.data_ptr(), b.numel()) for b in pool._free) for pool in pools))
    return kept[-2], kept[-1], full_weights(model)


def train_with_each(gram: bool) -> list[tuple[bool, bool]]:
    """Whether this rank keeps buffers, of either way, for each setting."""
    _, _, expected = train(False, gram)
    answers = []
    for reuse in (False, "gather", "scatter", "all", True):
        before, after, weights = train(reuse, gram)
        assert before == after
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        answers.append((bool(after[0]), bool(after[1])))
    return answers


@pytest.mark.parametrize("gram", [False, pytest.param(True, marks=pytest.mark.combination)])
def test_buffers_stay_from_step_to_step(ranks, gram):
    ways = (not gram, True)  # in the Gram form no gradient travels
    for answers in ranks(4, train_with_each, gram):
        expected = [(False, False), (True, False), (False, True), (True, True), (True, True)]
        assert answers == [(to and ways[0], back) for to, back in expected]


@pytest.mark.parametrize("value", ["scater", None, 2, 1])
def test_other_values_are_refused(ranks, value):
    ranks(1, refuse, value)


def refuse(value: Any) -> None:
    with pytest.raises(ValueError, match="tp_buffer_reuse"):
        distribute(Model(), {"dp": 1}, tp_buffer_reuse=value)
