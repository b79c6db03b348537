"""DDP: the model whole on every rank, its matrices updated by their owners."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dmuon
import layouts
from dmuon.engine import fsdp
from dmuon.engine.parameter import local_part
from dmuon.engine.runtime import find_runtime
from layouts import LAYOUTS, Model, build, distribute, is_proj, loss_of, make_mesh
from models import (
    InnerProducts,
    Transformer,
    agreed,
    assert_ranks_equal,
    assert_weights_close,
    backward_both,
    everything,
    full_weights,
    mean_backward,
    step_both,
    with_oracle,
)
from models import loss_of as token_loss
from reference import ReferenceMuon

DDP = {"ddp": 4}
DDP_TP = {"ddp": 2, "tp": 2}
BOTH = [pytest.param(DDP, id="ddp4"), pytest.param(DDP_TP, id="ddp2-tp2")]


def train_inside_torchs_ddp(order: str) -> None:
    """order: the wrapper is built before the optimizer, which gets it or the model inside; or after it."""
    torch.manual_seed(1)
    model = Transformer()
    oracle, reference = with_oracle(model)
    mesh = make_mesh(DDP)
    dmuon.dedicate_params_ddp(model, mesh["dp"], predicate=is_proj)
    if order == "after":
        optimizer = dmuon.Muon(model)
        with torch.no_grad():
            token_loss(model, 0)
        with pytest.raises(RuntimeError, match=r"embed\.weight is neither dedicated nor sharded"):
            token_loss(model, 0)
    wrapped = DistributedDataParallel(model)
    if order != "after":
        optimizer = dmuon.Muon(wrapped if order == "before" else model)
    for step in range(3):
        token_loss(wrapped, 10 * step + dist.get_rank()).backward()
        mean_backward(oracle, token_loss, [10 * step + rank for rank in range(4)])
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    assert list(get_model_state_dict(wrapped)) == list(oracle.state_dict())


@pytest.mark.parametrize("order", ["before", "inside", "after"])
def test_torchs_ddp_around_the_base_parameters(ranks, order):
    ranks(4, train_inside_torchs_ddp, order)


def wrong_wrappers(shape: tuple[int, ...]) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp",))
    messages = []
    for case in ("fully_shard", "replicate"):
        model = Model()
        dedicate = dmuon.dedicate_params if case == "fully_shard" else dmuon.dedicate_params_ddp
        dedicate(model, mesh["dp"], predicate=is_proj)
        if case == "replicate":
            dmuon.replicate(model, mesh["dp"])
        with pytest.raises(RuntimeError, match="DistributedDataParallel") as caught:
            DistributedDataParallel(model)
        messages.append(str(caught.value))
    return messages


def test_torchs_ddp_around_what_it_must_not_be_around(ranks):
    fully_sharded, replicated = agreed(ranks, (2,), wrong_wrappers)
    assert "layers.0.mix_proj.weight is dedicated by dmuon.dedicate_params" in fully_sharded
    assert "dmuon.replicate averages" in replicated


# What is kept where


def storages(sizes: dict[str, int], param_dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of dedicated weights this rank keeps after a step, counting each storage once."""
    torch.manual_seed(1)
    model = Model(width=32, hidden=64)
    policy = None if param_dtype is None else MixedPrecisionPolicy(param_dtype=param_dtype)
    distribute(model, sizes, mp_policy=policy)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=param_dtype is not None):
            model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    kept: dict[int, int] = {}
    expected = 0
    for param in dmuon.get_dedicated_params(model):
        for tensor in (param.gathered, param.resting):
            local = getattr(tensor, "_local_tensor", tensor)
            storage = local.untyped_storage()
            if local.numel():
                kept[storage.data_ptr()] = storage.nbytes()
        expected += param.piece_shape.numel() * 4
    return {"kept": sum(kept.values()), "expected": expected}


@pytest.mark.always("ddp4-own", "ddp2-tp2-bfloat16")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["own", "bfloat16"])
@pytest.mark.parametrize("sizes", BOTH)
def test_no_second_copy_of_a_weight(ranks, sizes, param_dtype):
    """The resting weight, which the model computes with; rounded copies live from forward to backward."""
    for answer in ranks(4, storages, sizes, param_dtype):
        assert answer["kept"] == answer["expected"]


# What a rank uses alone


class WithBias(InnerProducts):
    """With base parameters of which one is used on the ranks it is told, another one nowhere."""

    def __init__(self, weights: list[torch.Tensor], users: range) -> None:
        super().__init__(weights)
        self.users = users
        self.bias = nn.Parameter(torch.ones(2))
        self.shift = nn.Parameter(torch.ones(2))  # used everywhere: torch's DDP does not end without
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, targets: list[torch.Tensor | None]) -> torch.Tensor:
        extra = self.bias.sum() if dist.get_rank() in self.users else 0
        return super().forward(targets) + self.shift.sum() + extra


def used_by_one(averages: str) -> dict[str, torch.Tensor]:
    """The second matrix is used on rank 0 alone, the third nowhere."""
    torch.manual_seed(1)
    weights = [torch.randn(4, 6) for _ in range(3)]
    model = WithBias(weights, range(1 if averages == "torch" else 4))  # FSDP2: on all ranks, or on none
    mesh = make_mesh(DDP)
    dmuon.dedicate_params_ddp(
        model, mesh["dp"], predicate=lambda n, p: p.ndim == 2, hook_boundary=lambda name, module: name == ""
    )
    if averages == "torch":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped = dmuon.replicate(model, mesh["dp"])
    optimizer = dmuon.Muon(wrapped, lr=0.1, weight_decay=0.1)
    target = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        mine = [target, target if dist.get_rank() == 0 else None, None]
        wrapped(mine).backward()
        optimizer.step()
        optimizer.synchronize()
    weights = full_weights(model)
    assert_ranks_equal(weights)
    weights["momentum"] = optimizer.state[model.layers[1].weight]["momentum_buffer"]._local_tensor
    assert model.spare.grad is None
    torch.testing.assert_close(
        local_part(model.bias.grad), torch.full((2,), len(model.users) / 2)
    )  # added up
    return weights


@pytest.mark.parametrize("averages", ["torch", "ours"])
def test_a_parameter_used_on_one_rank_only(ranks, averages):
    torch.manual_seed(1)
    weights = [torch.randn(4, 6) for _ in range(3)]
    target = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    oracle = InnerProducts(weights)
    reference = ReferenceMuon(oracle, everything, lr=0.1, weight_decay=0.1)
    for step in (1, 2):  # gradients are not zeroed in between
        oracle.layers[0].weight.grad = step * target
        oracle.layers[1].weight.grad = step * target / 4
        reference.step()
    answers = ranks(4, used_by_one, averages)
    for index, layer in enumerate(oracle.layers):
        difference = (answers[0][f"layers.{index}.weight"] - layer.weight).abs().max()
        assert difference < 1e-5, index
    buffers = [a["momentum"] for a in answers if a["momentum"].numel()]
    assert len(buffers) == 1
    torch.testing.assert_close(buffers[0], reference.buffers[oracle.layers[1].weight], atol=1e-6, rtol=0)


def step_before_the_first_forward(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model, sizes)
    state = model.state_dict()
    get_optimizer_state_dict(model, optimizer)  # which steps by itself, on zero gradients
    model.load_state_dict(state)  # while the publish of this step is in flight
    dist.barrier()
    for name, weight in full_weights(model).items():
        assert torch.equal(weight, before[name]), name


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize("sizes", BOTH)
def test_the_state_of_an_optimizer_that_never_stepped(ranks, sizes):
    ranks(4, step_before_the_first_forward, sizes)


# Equal from the start


def different_seeds(sizes: dict[str, int]) -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    model.register_buffer("running", torch.randn(3))
    model.register_buffer("steps", torch.tensor(dist.get_rank()))
    if "tp" in sizes:  # the ranks of one replica share their weights, as parallelize_module expects
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(
                tensor.detach(),
                dist.get_rank() // 2 * 2,
                group=dist.new_group(
                    [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1], use_local_synchronization=True
                ),
            )
    build(model, sizes)
    loss_of(model, 0)
    assert_ranks_equal(full_weights(model) | {"running": model.running, "steps": model.steps})


@pytest.mark.parametrize("sizes", BOTH)
def test_different_seeds_are_made_equal(ranks, sizes):
    ranks(4, different_seeds, sizes)


def on_meta(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    oracle = Model()
    reference = ReferenceMuon(oracle, is_proj)
    with torch.device("meta"):
        model = Model()
    distribute(model, sizes)
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        with torch.no_grad():
            value = oracle.get_parameter(name)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            record = find_runtime(model).record_of(param)
            if record is None:
                param.copy_(value)
            elif record.keeps_weight:
                whole = oracle.get_parameter(name)
                record.local.copy_(
                    whole if record.tp is None else whole[record.tp.pieces[record.tp.position]]
                )
            if record is not None:
                record.mark_updated()
    optimizer = dmuon.Muon(model)
    mine, replicas = layouts.data_rank(sizes)
    for step in range(2):
        loss_of(model, 10 * step + mine).backward()
        mean_backward(oracle, loss_of, [10 * step + rank for rank in range(replicas)])
        step_both(optimizer, reference)
    assert_weights_close(model, oracle)


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize("sizes", BOTH)
def test_meta_device_construction(ranks, sizes):
    ranks(4, on_meta, sizes)


def change_dtype() -> None:
    """The model computes with the resting weights themselves, in whatever dtype they are.

    Without base parameters: FSDP2's keep the dtype of their first forward.
    """
    torch.manual_seed(1)
    before = [torch.randn(4, 6) for _ in range(3)]
    targets = [torch.ones(4, 6)] * 3
    model = InnerProducts(before)
    dmuon.dedicate_params_ddp(model, make_mesh(DDP)["dp"], predicate=everything)
    model(targets)
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)
        model([target.to(dtype) for target in targets])
        for weight, old in zip(full_weights(model).values(), before, strict=True):
            assert weight.dtype == dtype
            assert torch.equal(weight, old.to(dtype))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model([target.bfloat16() for target in targets])
    for param, old in zip(dmuon.get_dedicated_params(model), before, strict=True):
        assert torch.equal(param.gathered.detach(), 2 * old.bfloat16())


def test_changes_of_dtype_and_in_place(ranks):
    ranks(4, change_dtype)


# State dicts


def states(sizes: dict[str, int], param_dtype: torch.dtype | None) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    policy = None if param_dtype is None else MixedPrecisionPolicy(param_dtype=param_dtype)
    distribute(model, sizes, mp_policy=policy)
    optimizer = dmuon.Muon(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=param_dtype is not None):
        loss_of(model, 0).backward()
    loss_of(oracle, 0).backward()
    optimizer.step()
    reference.step()
    copy.deepcopy(optimizer.state_dict())  # as those do who keep the last good one in memory
    if dist.get_rank() < 1 and "tp" not in sizes and param_dtype is None:
        model.state_dict()  # as scripts for DDP do, on one rank alone
    state, optim = model.state_dict(), get_optimizer_state_dict(model, optimizer)["state"]
    for name, expected in oracle.named_parameters():
        value, momentum = state[name], optim[name].get("momentum_buffer")
        plain = not isinstance(value, DTensor)
        if is_proj(name, expected):  # the others are FSDP2's, on rows of one
            assert plain if "tp" not in sizes else plain or value.device_mesh.ndim == 1
        whole = value if plain else value.full_tensor()
        assert whole.shape == expected.shape
        if param_dtype is None:
            assert (whole - expected).abs().max() < 1e-5, name
        if not is_proj(name, expected):
            continue
        whole = momentum if not isinstance(momentum, DTensor) else momentum.full_tensor()
        if param_dtype is None:
            assert (whole - reference.buffers[expected]).abs().max() < 1e-6, name
        assert whole.dtype == value.dtype == torch.float32
        if plain:
            assert value.untyped_storage().nbytes() == value.numel() * 4  # not the whole buffer
    other = Model()
    distribute(other, sizes, mp_policy=policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=param_dtype is not None):
        loss_of(other, 0)  # its buffers hold other weights
        other.load_state_dict(state)
        loss_of(other, 0)
    expected = full_weights(model)
    for name, weight in full_weights(other).items():
        assert torch.equal(weight, expected[name]), name
    if param_dtype is None:
        torch.testing.assert_close(loss_of(other, 1), loss_of(model, 1), atol=0, rtol=0)


@pytest.mark.always("ddp4-own", "ddp2-tp2-bfloat16")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["own", "bfloat16"])
@pytest.mark.parametrize("sizes", BOTH)
def test_state_dicts_are_those_of_ddp(ranks, sizes, param_dtype):
    ranks(4, states, sizes, param_dtype)


def state_dict_on_one_rank() -> None:
    """As scripts for DDP save: after steps, while other ranks go on."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, DDP)
    for step in range(3):
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        if dist.get_rank() == step:
            for name, value in model.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(whole, oracle.state_dict()[name], atol=1e-5, rtol=0)
    assert_weights_close(model, oracle)


def test_state_dict_on_one_rank_alone(ranks):
    ranks(4, state_dict_on_one_rank)


# Weights that the user writes


def swap_in_an_average(sizes: dict[str, int]) -> None:
    """Write an average of the weights into the parameters, evaluate, write the weights back, train on."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    averages = [{name: p.detach().clone() for name, p in m.named_parameters()} for m in (model, oracle)]
    for step in range(3):
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        optimizer.synchronize()
        weights = []
        for one, average in zip((model, oracle), averages, strict=True):
            weights.append({name: p.detach().clone() for name, p in one.named_parameters()})
            for name, p in one.named_parameters():
                average[name].mul_(0.5).add_(p.detach(), alpha=0.5)
                p.data.copy_(average[name])
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            torch.testing.assert_close(model(x), oracle(x), atol=1e-5, rtol=0)
        fsdp.reshard(model)  # FSDP2 itself would go on with the base parameters of the evaluation
        for one, before in zip((model, oracle), weights, strict=True):
            for name, p in one.named_parameters():
                p.data.copy_(before[name])
    assert_weights_close(model, oracle)


@pytest.mark.always("hsdp2x1-tp2", "ddp4")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_an_average_that_is_swapped_in(ranks, sizes):
    ranks(4, swap_in_an_average, sizes)


# What is refused


def refusals() -> list[str]:
    messages = []

    def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=r"dmuon|mesh|process_group|already") as caught:
            fn(*args, **kwargs)
        messages.append(str(caught.value))

    mesh = make_mesh({"dp": 2, "tp": 2})
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = Model()
    layouts.parallelize(model, mesh)
    refused(dmuon.dedicate_params_ddp, model, mesh["dp"], predicate=is_proj)
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], predicate=lambda n, p: "mix_proj" in n)
    refused(dmuon.replicate, model, mesh["dp"])
    refused(dmuon.replicate_tp, model, mesh["tp"])
    refused(dmuon.Muon, model)
    refused(dmuon.replicate, Model(), mesh["dp"])
    refused(dmuon.dedicate_params_ddp, Model(), mesh)
    model = Model()
    dmuon.dedicate_params(model, flat, predicate=is_proj)
    refused(dmuon.replicate, model, flat)
    model = Model()
    dmuon.dedicate_params_ddp(model, flat, predicate=is_proj)
    dmuon.replicate(model, flat)
    refused(dmuon.replicate, model, flat)
    model = Model()
    dmuon.dedicate_params_ddp(model, flat, predicate=is_proj)
    fully_shard(model, mesh=flat)
    refused(dmuon.Muon, model)
    model = Model()
    dmuon.dedicate_params_ddp(model, flat, predicate=is_proj)
    pair = dist.get_rank() // 2 * 2
    group = dist.new_group([pair, pair + 1], use_local_synchronization=True)
    refused(dmuon.Muon, DistributedDataParallel(model, process_group=group))
    return [message.replace("[2, 3]", "[0, 1]").replace("[1, 3]", "[0, 2]") for message in messages]


def test_what_does_not_fit_is_refused(ranks):
    answers = ranks(4, refusals)
    assert all(answer == answers[0] for answer in answers)
    (cut, base, other_mesh, nobody, undedicated, two_dims, fsdp, twice, sharded, group) = answers[0]
    assert "layers.0.up_proj.weight" in cut
    assert "dmuon.dedicate_params_ddp_tp" in cut
    assert "dmuon.replicate_tp" in base
    assert "layers.0." in base
    assert "the ranks [0, 2]" in other_mesh
    assert "dmuon.replicate(model, mesh)" in nobody
    assert "dedicate_params" in undedicated
    assert 'mesh["dp"]' in two_dims
    assert "fully_shard" in fsdp
    assert "already" in twice
    assert "dmuon.dedicate_params with fully_shard" in sharded
    assert "process_group" in group
