"""States and orders that a training loop can produce, found by review."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dmuon
import layouts
from layouts import Model, build, distribute, loss_of, make_mesh
from models import (
    InnerProducts,
    assert_weights_close,
    backward_both,
    everything,
    full_weights,
    mean_backward,
    step_both,
    with_oracle,
)

DDP = {"ddp": 4}
DDP_TP = {"ddp": 2, "tp": 2}
HSDP = {"replicate": 2, "shard": 2}
FSDP = {"dp": 4}
FSDP_TP = {"dp": 2, "tp": 2}
HSDP_TP = {"replicate": 1, "shard": 2, "tp": 2}
ALL = [
    pytest.param(s, id="-".join(f"{k}{n}" for k, n in s.items())) for s in (DDP, DDP_TP, HSDP, FSDP, FSDP_TP)
]


# Memory


def kept_by_counts() -> list[int]:
    """Bytes that are kept beside the gradient of a matrix that its owner itself does not use."""
    torch.manual_seed(1)
    model = InnerProducts([torch.randn(40, 60), torch.randn(40, 60)])
    mesh = make_mesh(FSDP)
    dmuon.dedicate_params(model, mesh["dp"], predicate=everything)
    fully_shard(model, mesh=mesh["dp"])
    dmuon.Muon(model)
    for _ in range(5):
        target = torch.randn(40, 60)
        model([target, target if dist.get_rank() == 3 else None]).backward()
    kept = 0
    for param in model.parameters():
        for value in vars(param.grad).values():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor is not param.grad._local_tensor:
                    kept += tensor.untyped_storage().nbytes()
    return [kept]


def test_accumulation_keeps_no_reduction_buffers(ranks):
    """Which ranks had a gradient is all that has to be remembered of each backward."""
    answers = ranks(4, kept_by_counts)
    assert max(kept for (kept,) in answers) <= 8, answers


# Gradients that the user sets


def set_even_gradient() -> None:
    """One row per rank: the owner's row would be broadcast over all of the momentum."""
    torch.manual_seed(1)
    model = InnerProducts([torch.randn(4, 6)])
    mesh = make_mesh(FSDP)
    dmuon.dedicate_params(model, mesh["dp"], predicate=everything)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model)
    model.layers[0].weight.grad = distribute_tensor(torch.randn(4, 6), mesh["dp"], [Shard(0)])
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight: its gradient"):
        optimizer.step()


def test_an_evenly_sharded_gradient_is_refused(ranks):
    ranks(4, set_even_gradient)


def preallocated(sizes: dict[str, int], has_team: bool) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    gram = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"} if has_team else {}
    optimizer = build(model, sizes, **gram)
    mine, replicas = layouts.data_rank(sizes)
    for step in range(3):
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        loss_of(model, 10 * step + mine).backward()
        mean_backward(oracle, loss_of, [10 * step + rank for rank in range(replicas)])
        optimizer.step()
        reference.step()
        optimizer.zero_grad(set_to_none=step == 1)
        reference.zero_grad()
        assert_weights_close(model, oracle)


@pytest.mark.always("hsdp-tp-has_team", "ddp4-whole", "dp4-whole")
@pytest.mark.parametrize("has_team", [False, True], ids=["whole", "has_team"])
@pytest.mark.parametrize("sizes", [*ALL, pytest.param(HSDP_TP, id="hsdp-tp")])
def test_preallocated_gradients(ranks, sizes, has_team):
    if has_team and "tp" not in sizes:
        pytest.skip("nothing is in pieces")
    ranks(4, preallocated, sizes, has_team)


# The distributed Gram form and the order of calls


def gram_after_backward(synced: bool) -> None:
    torch.manual_seed(1)
    model = Model()
    distribute(model, FSDP_TP)
    if not synced:
        dmuon.Muon(model)
        with dmuon.no_sync(model):
            loss_of(model, 0).backward()
    else:
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="has a gradient already"):
        dmuon.Muon(model, tp_distributed_gram=True, tp_distributed_gram_policy="always")


@pytest.mark.parametrize("synced", [True, False])
def test_gradients_that_came_before_a_change_of_form(ranks, synced):
    ranks(4, gram_after_backward, synced)


def two_forms() -> None:
    torch.manual_seed(1)
    model = Model()
    distribute(model, FSDP_TP)
    first = dmuon.Muon(model)
    loss_of(model, 0).backward()
    first.step()
    first.zero_grad()
    before = first.state_dict()
    second = dmuon.Muon(model, tp_distributed_gram=True, tp_distributed_gram_policy="always")
    with pytest.raises(RuntimeError, match="another Muon has been built"):
        first.state_dict()
    second.load_state_dict(before)
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="another Muon has been built"):
        first.step()
    second.step()


def test_an_optimizer_whose_momentum_was_left_behind(ranks):
    ranks(4, two_forms)


# Exceptions in the middle of accumulation, under `replicate`


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


class Fragile(Model):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(Fuse.apply(x) if self.fails and index == 1 else x)
        return self.head(x)


def accumulate_in_turn(sizes: dict[str, int]) -> None:
    """Backwards with and without communication, in any order, add up."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    mine, replicas = layouts.data_rank(sizes)
    for micro, synced in enumerate([False, True, False, False, True]):
        with contextlib.nullcontext() if synced else dmuon.no_sync(model):
            loss_of(model, 10 * micro + mine).backward()
        for rank in range(replicas):
            (loss_of(oracle, 10 * micro + rank) / replicas).backward()
    optimizer.step()
    reference.step()
    assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", ALL[:2])
def test_backwards_with_and_without_communication_in_turn(ranks, sizes):
    ranks(4, accumulate_in_turn, sizes)


# Double backward


def penalized(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y = model(x).square().mean()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return y + gradient.square().sum()


def gradient_penalty(sizes: dict[str, int]) -> None:
    """Refused where FSDP2 itself would read freed memory, and where torch's tensor parallelism is wrong."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    with pytest.raises(RuntimeError, match=r"create_graph.*layers\.1\.mix_proj\.weight.*freed"):
        penalized(model, 0)
    model.set_reshard_after_backward(False)
    if "tp" in sizes:
        with pytest.raises(RuntimeError, match=r"create_graph.*layers\.1\.up_proj\.weight is cut"):
            penalized(model, 0)
        return
    for step in range(2):
        backward_both(model, oracle, step, penalized)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"ddp": 2}, {"dp": 1, "tp": 2}], ids=str)
def test_a_gradient_penalty(ranks, sizes):
    ranks(2, gradient_penalty, sizes)


# State dicts


def storages_of_momentum() -> list[bool]:
    torch.manual_seed(1)
    model = Model()
    optimizer = build(model, DDP_TP)
    loss_of(model, 0).backward()
    optimizer.step()
    entries = [entry for entry in optimizer.state_dict()["state"].values() if "momentum_buffer" in entry]
    locals_ = [getattr(e["momentum_buffer"], "_local_tensor", e["momentum_buffer"]) for e in entries]
    return [t.untyped_storage().nbytes() == t.nbytes for t in locals_]


def test_a_state_dict_holds_pieces_not_whole_matrices(ranks):
    for answer in ranks(4, storages_of_momentum):
        assert all(answer)
        assert answer


# Changes that no version shows


def change_unseen(how: str) -> None:
    torch.manual_seed(1)
    model = Model()
    build(model, DDP)
    loss_of(model, 0)
    records = dmuon.get_dedicated_params(model)
    before = full_weights(model)
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_mul_([record.resting for record in records], 0.5)
        else:
            for record in records:
                (record.resting.data if how == "data" else record.resting.to_local()).mul_(0.5)
    for record in records:
        record.mark_updated()
    loss_of(model, 0)
    for record in records:
        assert torch.equal(record.gathered.detach(), 0.5 * before[record.param_name]), record


@pytest.mark.parametrize("how", ["foreach", "data", "to_local"])
def test_changes_past_the_version_counter_can_be_told(ranks, how):
    ranks(4, change_unseen, how)
