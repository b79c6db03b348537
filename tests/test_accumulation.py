"""Gradient accumulation, with and without communication: the same update, one Newton-Schulz per matrix."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import dmuon
import dmuon.optim.parts
from dmuon.engine.runtime import find_runtime
from layouts import (
    LAYOUTS,
    Layer,
    Model,
    Sizes,
    build,
    data_rank,
    dedicate_on,
    distribute,
    is_proj,
    loss_of,
    make_mesh,
    shard,
)
from models import (
    InnerProducts,
    agreed,
    assert_ranks_equal,
    assert_weights_close,
    backward_both,
    full_weights,
    mean_backward,
    step_both,
    with_oracle,
)

pytestmark = pytest.mark.always("dp4", "hsdp2x2-all_reduce", "ddp2-tp2")

Micro = Callable[
    [nn.Module, bool], contextlib.AbstractContextManager
]  # of the model, and whether it is the last


@contextlib.contextmanager
def every_one(model: nn.Module, last: bool):
    yield


@contextlib.contextmanager
def no_sync(model: nn.Module, last: bool):
    with contextlib.nullcontext() if last else dmuon.no_sync(model):
        yield


@contextlib.contextmanager
def nested(model: nn.Module, last: bool):
    if last:
        yield
        return
    with dmuon.no_sync(model):
        with dmuon.no_sync(model):
            pass
        yield  # the inner exit must not have turned it on again


@contextlib.contextmanager
def gradient_sync(model: nn.Module, last: bool):
    model.set_requires_gradient_sync(last)
    yield


@contextlib.contextmanager
def all_reduce(model: nn.Module, last: bool):
    model.set_requires_all_reduce(last)
    yield


@contextlib.contextmanager
def last_backward(model: nn.Module, last: bool):
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)
    yield


OURS = [every_one, no_sync, nested]
FSDP2S = [gradient_sync, all_reduce, last_backward]


@contextlib.contextmanager
def counted_newton_schulz() -> Iterator[list[torch.Size]]:
    """The shapes of the matrices that this rank has orthogonalized."""
    calls: list[torch.Size] = []
    original = dmuon.optim.parts.orthogonalize

    def counted(batch: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.extend(matrix.shape for matrix in batch)
        return original(batch, *args)

    with mock.patch.object(dmuon.optim.parts, "orthogonalize", counted):
        yield calls


def train(sizes: dict[str, int], micro: Micro, reshard: bool = True) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    mine, replicas = data_rank(sizes)
    with counted_newton_schulz() as calls:
        for step in range(3):
            calls.clear()
            for index in range(3):
                seeds = [100 * step + 10 * index + rank for rank in range(replicas)]
                with micro(model, index == 2):
                    loss_of(model, seeds[mine]).backward()
                mean_backward(oracle, loss_of, seeds)
            step_both(optimizer, reference)
            owned = sum(param.is_owner for param in dmuon.get_dedicated_params(model))
            assert len(calls) == owned
            assert_weights_close(model, oracle)
            for param in dmuon.get_dedicated_params(model):
                if param.is_owner:
                    momentum = optimizer.state[param.resting]["momentum_buffer"]._local_tensor
                    expected = reference.buffers[oracle.get_parameter(param.param_name)]
                    assert (momentum - expected).abs().max() < 1e-6


@pytest.mark.always("dp4-no_sync", "dp4-nested", "hsdp2x1-tp2-no_sync", "ddp2-tp2-every_one")
@pytest.mark.parametrize("micro", OURS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_every_way_gives_the_same_update(ranks, sizes, micro):
    ranks(4, train, sizes, micro)


@pytest.mark.always("dp4-gradient_sync", "dp4-last_backward", "hsdp2x2-all_reduce", "ddp2-tp2-last_backward")
@pytest.mark.parametrize("micro", FSDP2S, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_fsdp2s_own_switches(ranks, sizes, micro):
    ranks(4, train, sizes, micro)


@pytest.mark.parametrize("micro", [no_sync, all_reduce, last_backward], ids=lambda fn: fn.__name__)
def test_with_weights_kept_until_backward(ranks, micro):
    ranks(4, train, {"replicate": 2, "shard": 2}, micro, False)


def train_in_torchs_ddp() -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    dmuon.dedicate_params_ddp(model, make_mesh({"ddp": 4})["dp"], predicate=is_proj)
    wrapped = DistributedDataParallel(model)
    optimizer = dmuon.Muon(wrapped)
    for step in range(2):
        for index in range(3):
            seeds = [100 * step + 10 * index + rank for rank in range(4)]
            with no_sync(wrapped, index == 2):
                loss_of(wrapped, seeds[dist.get_rank()]).backward()
            mean_backward(oracle, loss_of, seeds)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


def test_torchs_ddp(ranks):
    ranks(4, train_in_torchs_ddp)


# What is communicated

REDUCTIONS = {"reduce", "reduce_replicas", "exchange"}


def traffic(sizes: dict[str, int], micro: Micro) -> list[dict[str, int]]:
    model = Model()
    build(model, sizes)
    runtime = find_runtime(model)
    loss_of(model, 0).backward()
    seen = []
    for index in range(2):
        runtime.traffic.reset()
        with micro(model, index == 1):
            loss_of(model, 0).backward()
        seen.append(dict(runtime.traffic.collectives))
    return seen


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_nothing_is_reduced_without_sync(ranks, sizes):
    for unsynced, synced in ranks(4, traffic, sizes, no_sync):
        assert not set(unsynced) & REDUCTIONS
        assert set(synced) & REDUCTIONS


def test_replicas_are_left_out_without_all_reduce(ranks):
    for unsynced, synced in ranks(4, traffic, {"replicate": 2, "shard": 2}, all_reduce):
        assert "reduce_replicas" not in unsynced
        assert unsynced["reduce"] == synced["reduce"]
    assert any("reduce_replicas" in s for _, s in ranks(4, traffic, {"replicate": 2, "shard": 2}, all_reduce))


def test_weights_that_are_not_resharded_are_not_gathered_again(ranks):
    for first, second in ranks(4, traffic, {"dp": 4}, last_backward):
        assert first["gather"] == 2 * second["gather"] > 0  # its forward found those of the backward before


# Gradients that wait


def drop(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    mine, replicas = data_rank(sizes)
    for step in range(2):
        micro = all_reduce if step else no_sync
        with micro(model, False):
            loss_of(model, 7).backward()
        optimizer.zero_grad()
        if micro is all_reduce:
            model.set_requires_all_reduce(True)
        loss_of(model, step + mine).backward()
        mean_backward(oracle, loss_of, [step + rank for rank in range(replicas)])
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_zero_grad_drops_what_was_not_reduced(ranks, sizes):
    ranks(4, drop, sizes)


class Branches(nn.Module):
    """Layers that are used in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6, 13) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x)
        return self.head(x)


def skip_in_the_last(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Branches()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    mine, replicas = data_rank(sizes)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        return m(x, [[0, 1], [1, 2], [0]][seed // 10 % 10 % 3]).square().mean()

    for step in range(2):
        for index in range(3):
            seeds = [100 * step + 10 * index + rank for rank in range(replicas)]
            with no_sync(model, index == 2):
                loss(model, seeds[mine]).backward()
            mean_backward(oracle, loss, seeds)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_layers_that_the_last_micro_batch_skips(ranks, sizes):
    ranks(4, skip_in_the_last, sizes)


def diagonals(sizes: Sizes, micro: Micro) -> None:
    """Mean gradients diag(2, 0) and diag(-1, 1) in two micro-batches: the update is that of the sum."""
    model = InnerProducts([torch.zeros(2, 2)] * 3 + [torch.zeros(4, 4)])
    optimizer = build(model, sizes, predicate=lambda name, param: param.shape == (2, 2), lr=0.1)
    mine, replicas = data_rank(sizes)
    off = 4 * (mine - (replicas - 1) / 2)  # the mean over the ranks is 0
    spare = torch.zeros(4, 4)  # a base parameter
    with counted_newton_schulz() as calls:
        for index, diagonal in enumerate(([2.0, 0.0], [-1.0, 1.0])):
            with micro(model, index == 1):
                model([torch.diag(torch.tensor(diagonal)) + off] * 3 + [spare]).backward()
        optimizer.step()
    assert len(calls) == sum(record.is_owner for record in dmuon.get_dedicated_params(model))
    expected = -0.1 * 1.108111 * torch.eye(2)
    for record in dmuon.get_dedicated_params(model):
        torch.testing.assert_close(record.full_tensor(), expected, atol=1e-6, rtol=0)
    assert_ranks_equal(full_weights(model))


def all_diagonals(sizes: Sizes) -> None:
    for micro in [every_one, no_sync, *FSDP2S]:
        diagonals(sizes, micro)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_two_micro_batches_are_one_update(ranks, sizes):
    ranks(4, all_diagonals, sizes)


# In which dtype


def large_and_small(sizes: Sizes) -> None:
    """Gradients of 256 and 1, in bfloat16, whose sum is 256 there."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = InnerProducts([torch.zeros(3, 5)] * 3 + [torch.zeros(4, 4)])
    distribute(model, sizes, predicate=lambda name, param: param.shape == (3, 5), mp_policy=policy)
    optimizer = dmuon.Muon(model)
    for micro in [no_sync, *FSDP2S]:
        for index, value in enumerate((256.0, 1.0)):
            with micro(model, index == 1):
                model([torch.full((3, 5), value).bfloat16()] * 3 + [torch.zeros(4, 4)]).backward()
        for record in dmuon.get_dedicated_params(model):
            if record.is_owner:
                assert (record.local_gradient() == 257).all(), micro.__name__
        optimizer.zero_grad()


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_gradients_add_up_in_the_reduce_dtype(ranks, sizes):
    ranks(4, large_and_small, sizes)


def many_as_fsdp2(sizes: Sizes) -> None:
    """16 micro-batches in bfloat16, beside plain FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(1)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    mesh = dedicate_on(model, sizes)
    for one in (plain, model):
        shard(one, mesh, mp_policy=policy)
    find_runtime(model).seal()
    for index in range(16):
        for one in (plain, model):
            one.set_requires_gradient_sync(index == 15)
            loss_of(one, 10 * index + dist.get_rank()).backward()
    for record in dmuon.get_dedicated_params(model):
        expected = plain.get_parameter(record.param_name).grad.full_tensor()
        if record.is_owner:
            torch.testing.assert_close(record.local_gradient(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"replicate": 2, "shard": 2}], ids=str)
def test_many_micro_batches_are_those_of_fsdp2(ranks, sizes):
    ranks(4, many_as_fsdp2, sizes)


# Steps without a last backward


def ignored(sizes: Sizes) -> list[str]:
    """A step while nothing is to be reduced; zero_grad lets the training go on."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    messages = []
    ways = [no_sync, *FSDP2S] if find_runtime(model).layout.replicate_size > 1 else [no_sync, gradient_sync]
    for step, micro in enumerate(ways):
        with micro(model, False):
            loss_of(model, 7).backward()
            with pytest.raises(RuntimeError, match=r"layers\.0\.\w+\.weight has gradients") as caught:
                optimizer.step()
        messages.append(str(caught.value))
        optimizer.zero_grad()
        with micro(model, True):
            backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    return messages


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_step_that_would_ignore_gradients_is_an_error(ranks, sizes):
    agreed(ranks, sizes, ignored)


def reduced_when_due(sizes: Sizes, micro: Micro) -> None:
    """Sync is switched on again, but no backward follows: what comes next reduces."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    scaler = dmuon.GradScaler("cpu", init_scale=4.0)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        return scaler.scale(loss_of(m, seed)) if m is model else loss_of(m, seed)

    for step, what_comes_next in enumerate(["step", "clip", "scaler", "step"]):
        for index in range(2):
            with micro(model, False):
                scaled = loss if what_comes_next == "scaler" else loss_of
                backward_both(model, oracle, 10 * step + index, scaled)
        with micro(model, True):
            pass
        if what_comes_next == "clip":
            norm = dmuon.clip_grad_norm_(model, 0.1)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        elif what_comes_next == "scaler":
            scaler.unscale_(optimizer)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-no_sync", "hsdp2x2-last_backward", "ddp2-tp2-gradient_sync")
@pytest.mark.parametrize("micro", [no_sync, gradient_sync, last_backward], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_gradients_that_are_due_are_reduced(ranks, sizes, micro):
    ranks(4, reduced_when_due, sizes, micro)


def base_gradients_wait_for_the_replicas(sizes: Sizes) -> str:
    """FSDP2 brings these to the replicas in a backward only."""
    model = Model()
    optimizer = build(model, sizes)
    with all_reduce(model, False):
        loss_of(model, 7).backward()
    with all_reduce(model, True), pytest.raises(RuntimeError, match="are not reduced") as caught:
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [{"replicate": 2, "shard": 2}, {"ddp": 4}], ids=str)
def test_base_gradients_that_wait_for_the_replicas(ranks, sizes):
    assert agreed(ranks, sizes, base_gradients_wait_for_the_replicas).startswith("head.weight has")


def divide(sizes: dict[str, int], factor: float) -> None:
    model = Model()
    distribute(model, sizes)
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    loss_of(model, 0).backward()
    oracle = Model()
    oracle.load_state_dict(full_weights(model))
    loss_of(oracle, 0).backward()
    for param in dmuon.get_dedicated_params(model):
        if param.is_owner:
            expected = oracle.get_parameter(param.param_name).grad * data_rank(sizes)[1] / factor
            torch.testing.assert_close(param.local_gradient(), expected)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_the_divisor_is_fsdp2s(ranks, sizes):
    ranks(4, divide, sizes, 3.0)


def changes_between_micro_batches() -> None:
    model = Model()
    optimizer = build(model, {"replicate": 2, "shard": 2})
    with all_reduce(model, False):
        loss_of(model, 0).backward()
    model.layers[0].up_proj.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"layers\.0\.up_proj\.weight: requires_grad has changed"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    with dmuon.no_sync(model):
        loss_of(model, 0).backward()
    for param in model.parameters():
        param.data = param.data.double()
    with pytest.raises(RuntimeError, match="converted"):
        model(torch.randn(2, 6).double())


def test_changes_that_would_lose_gradients_are_refused(ranks):
    ranks(4, changes_between_micro_batches, group_timeout=20.0)  # a world of its own: its queue has failed
