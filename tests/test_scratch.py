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


def train(reuse: Any, gram: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Model(depth=3)
    distribute(model, {"dp": 2, "tp": 2}, tp_buffer_reuse=reuse)
    policy = {"tp_distributed_gram": gram, "tp_distributed_gram_policy": "always"}
    optimizer = dmuon.Muon(model, **policy)
    channels = find_runtime(model)._channels
    kept = []
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        pools = (channels.gather_scratch, channels.scatter_scratch)
        kept.append([sorted((b.data_ptr(), b.numel()) for b in pool._free) for pool in pools])
    return {"kept": kept, "weights": full_weights(model)}


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("reuse", [False, True, "gather", "scatter", "all"])
def test_buffers_stay_from_step_to_step(ranks, reuse, gram):
    expected = ranks(4, train, False, gram)
    for rank, answer in enumerate(ranks(4, train, reuse, gram)):
        gather, scatter = answer["kept"][-1]
        if any(p for p in (gather, scatter)):  # this rank is in an owner row with something cut
            assert bool(gather) == (reuse in (True, "all", "gather"))
            assert bool(scatter) == (reuse in (True, "all", "scatter"))
        assert answer["kept"][-1] == answer["kept"][-2]
        for name, weight in answer["weights"].items():
            assert torch.equal(weight, expected[rank]["weights"][name]), name
    if reuse:
        assert any(answer["kept"][-1] != [[], []] for answer in ranks(4, train, reuse, gram))


@pytest.mark.parametrize("value", ["scater", None, 2, 1])
def test_other_values_are_refused(ranks, value):
    ranks(1, refuse, value)


def refuse(value: Any) -> None:
    with pytest.raises(ValueError, match="tp_buffer_reuse"):
        distribute(Model(), {"dp": 1}, tp_buffer_reuse=value)
