"""State dicts look like FSDP2's, and nothing is lost on the way through them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
import layouts
from models import (
    Transformer,
    assert_weights_close,
    backward_both,
    build,
    full_weights,
    loss_of,
    make_mesh,
    shard,
    with_oracle,
)

pytestmark = pytest.mark.always("dp2-tp2", "ddp4", "(4,)", "(2, 2)")

SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}


def compare_with_fsdp2(shape: tuple[int, ...]) -> None:
    plain = Transformer()
    model = copy.deepcopy(plain)
    mesh = make_mesh(shape)
    build(model, mesh)
    shard(plain, mesh)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        value = ours[name]
        assert isinstance(value, DTensor)
        assert value.placements == expected.placements
        assert value.device_mesh == expected.device_mesh
        assert torch.equal(value.to_local(), expected.to_local()), name
        assert torch.equal(value.full_tensor(), expected.full_tensor()), name


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2,), (4, 1), (1, 4), (1,)], ids=str)
def test_the_models_state_dict_is_fsdp2s(ranks, shape):
    ranks(shape[0] * (shape[1] if len(shape) == 2 else 1), compare_with_fsdp2, shape)


def train(model: nn.Module, optimizer: dmuon.Muon, steps: range) -> None:
    for step in steps:
        loss_of(model, 1000 * step + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(shape: tuple[int, ...], path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(1)
    model = Transformer()
    optimizer = build(model, make_mesh(shape), **SETTINGS)
    train(model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    train(model, optimizer, range(2, 4))
    keys = [f"{p}.{k}" for p, s in state["optimizer"]["state"].items() for k in s]
    return full_weights(model), keys


def resume(shape: tuple[int, ...], path: str) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
    torch.manual_seed(2)
    model = Transformer()
    optimizer = build(model, make_mesh(shape), **SETTINGS)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_world_size() == 4:
        train(model, optimizer, range(2, 4))
    dtypes = [s["momentum_buffer"].dtype for s in optimizer.state.values() if "momentum_buffer" in s]
    return full_weights(model), dtypes


@pytest.mark.always("(2, 2)")
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_resuming_is_bitwise_the_uninterrupted_run(ranks, shape, tmp_path: Path):
    saved = ranks(4, save, shape, str(tmp_path))
    assert all(keys == saved[0][1] for _, keys in saved), "ranks have different keys"
    resumed = ranks(4, resume, shape, str(tmp_path))
    for name, weight in saved[0][0].items():
        assert torch.equal(resumed[0][0][name], weight), name
    assert set(resumed[0][1]) == {torch.float32}


def test_resuming_on_another_mesh(ranks, tmp_path: Path):
    expected = ranks(4, save, (4,), str(tmp_path))[0][0]
    weights = ranks(4, resume, (2, 2), str(tmp_path))[0][0]
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
    loaded = [ranks(n, resume, (n,), str(tmp_path))[0][0] for n in (1, 2)]
    for name, weight in loaded[0].items():
        assert torch.equal(loaded[1][name], weight)


def full_state_dicts(shape: tuple[int, ...]) -> None:
    model = Transformer()
    optimizer = build(model, make_mesh(shape), ns_dtype=torch.float64, **SETTINGS)
    train(model, optimizer, range(2))
    expected = full_weights(model)
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    for name, weight in expected.items():
        assert torch.equal(full[name], weight)
    other = Transformer()
    other_optimizer = build(other, make_mesh(shape), **SETTINGS)
    with torch.no_grad():
        loss_of(other, 0)  # weights are gathered before the load, and must not be used after it
    set_model_state_dict(other, full, options=options)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(other, other_optimizer, full, options=options)
    assert [group.get("ns_dtype") for group in other_optimizer.param_groups] == [torch.float64, None]
    assert all(torch.equal(w, expected[name]) for name, w in full_weights(other).items())
    other.load_state_dict(model.state_dict())
    # torch's own methods of the optimizer, within one layout; they do not copy AdamW's state.
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    expected = full_weights(model)
    assert all(torch.equal(w, expected[name]) for name, w in full_weights(other).items())


@pytest.mark.always("(2, 2)")
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_full_state_dicts_and_torchs_own_methods(ranks, shape):
    ranks(4, full_state_dicts, shape)


def never_stepped(sizes: layouts.Sizes) -> None:
    model = Transformer()
    model.layers[0].q_proj.weight.requires_grad_(False)
    oracle, reference = with_oracle(model)
    reference.muon = [p for p in reference.muon if p.requires_grad]
    reference.adamw = None
    optimizer = layouts.build(model, sizes, adamw_lr=0.0)
    before = full_weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(w, before[name]) for name, w in full_weights(model).items())
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.0]
    assert all(p.grad is None for p in model.parameters())
    for record in dmuon.get_dedicated_params(model):
        momentum = state["state"][record.param_name]["momentum_buffer"]
        assert momentum.shape == record.full_shape
        local = momentum.to_local() if isinstance(momentum, DTensor) else momentum
        assert not local.any()
    for step in range(2):
        backward_both(model, oracle, step)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for p in oracle.parameters():
            p.grad = None
        assert_weights_close(model, oracle)


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize("sizes", layouts.LAYOUTS)
def test_the_state_of_an_optimizer_that_never_stepped(ranks, sizes):
    ranks(4, never_stepped, sizes)


def bfloat16_model(shape: tuple[int, ...]) -> None:
    """The momentum is float32 beside bfloat16 weights, and a load does not round it."""
    model = Transformer().bfloat16()
    optimizer = build(model, make_mesh(shape))
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    other = build(Transformer().bfloat16(), make_mesh(shape))
    other.load_state_dict(state)
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    for mine, theirs in pairs:
        momentum = optimizer.state[mine]["momentum_buffer"].to_local()
        loaded = other.state[theirs]["momentum_buffer"].to_local()
        assert loaded.dtype == torch.float32
        assert torch.equal(momentum, loaded)
        if momentum.numel():
            assert not torch.equal(momentum, momentum.bfloat16().float())


@pytest.mark.always("(2, 2)")
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_momentum_keeps_its_dtype(ranks, shape):
    ranks(4, bfloat16_model, shape)


def misfits() -> None:
    model = Transformer()
    build(model, make_mesh((2,)))
    state = model.state_dict()
    state["layers.0.q_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.q_proj\.weight"):
        model.load_state_dict(state)
    del state["layers.0.q_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.q_proj\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(model.state_dict(), assign=True).missing_keys == []
    loss_of(model, 0).backward()  # assign=True has left the dedicated parameters where they are


def test_what_does_not_fit_is_reported_by_torch(ranks):
    ranks(2, misfits)
