"""`dmuon.as_sharded`: what FSDP2 would show, and what is written to it."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

import dmuon
from layouts import Model, Sizes, distribute, is_proj, loss_of, make_mesh, parallelize, shard
from models import assert_ranks_equal, assert_weights_close, backward_both, full_weights, step_both
from reference import ReferenceMuon
from test_mistakes import raised


def change(model: nn.Module, replace: bool = False) -> None:
    """In place, through `.data` and, if the caller says so, by another parameter."""
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            layer.mix_proj.weight.mul_(0.5 + index)
            layer.up_proj.weight.data /= 2
            if replace:
                layer.gate_proj.weight = nn.Parameter(layer.gate_proj.weight * 0.7)
            else:
                layer.gate_proj.weight.mul_(0.7)
            layer.down_proj.weight.copy_(layer.down_proj.weight * -1.2)


def write(sizes: Sizes, built: bool) -> None:
    """built: the optimizer is there already, and has stepped."""
    torch.manual_seed(1)
    model = Model(hidden=16)
    oracle = copy.deepcopy(model)
    plain: Any = copy.deepcopy(model)
    mesh = distribute(model, sizes)
    optimizer = dmuon.Muon(model) if built else None
    reference = ReferenceMuon(oracle, is_proj)
    if optimizer is not None:
        backward_both(model, oracle, 0, loss_of)
        step_both(optimizer, reference)
    if "ddp" not in sizes:
        if "tp" in sizes:
            parallelize(plain, mesh)
        shard(plain, mesh)
    resting = dict(model.named_parameters())
    with dmuon.as_sharded(model):
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if is_proj(name, param) and ("ddp" not in sizes or not isinstance(param, DTensor)):
                assert type(param) is type(expected)
                assert param.shape == expected.shape
                if isinstance(expected, DTensor):
                    assert param.placements == expected.placements
                    assert param.to_local().shape == expected.to_local().shape
        change(model, replace=True)
    change(oracle)
    assert all(param is resting[name] for name, param in model.named_parameters())
    assert_weights_close(model, oracle)
    optimizer = optimizer or dmuon.Muon(model)
    for step in range(1, 3):
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
    assert_weights_close(model, oracle)


@pytest.mark.always("dp2-True", "hsdp2x2-True", "dp2-tp2-False")
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"dp": 2}, id="dp2"),
        pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
        pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
        pytest.param({"ddp": 2}, id="ddp2"),
        pytest.param({"ddp": 2, "tp": 2}, id="ddp2-tp2"),
    ],
)
def test_what_is_written_is_taken_over(ranks, sizes, built):
    ranks(torch.tensor(list(sizes.values())).prod().item(), write, sizes, built)


def misuse() -> None:
    """Replicas that were written to differently; what cannot be taken over; exceptions inside."""
    torch.manual_seed(1)
    model = Model()
    distribute(model, {"ddp": 2})
    dmuon.Muon(model)
    with dmuon.as_sharded(model), torch.no_grad():
        model.layers[0].up_proj.weight.fill_(dist.get_rank())
    loss_of(model, 0)
    assert_ranks_equal(full_weights(model))
    before = full_weights(model)

    def lose() -> None:
        with dmuon.as_sharded(model):
            model.layers[1].up_proj.weight = None

    def reshape() -> None:
        with dmuon.as_sharded(model):
            model.layers[1].up_proj.weight = nn.Parameter(torch.zeros(2, 2))

    def run() -> None:
        with dmuon.as_sharded(model):
            loss_of(model, 0)

    for action in (lose, reshape):
        assert raised(RuntimeError, action).startswith("layers.1.up_proj.weight is gone, on the meta device")
    assert "another parameter has been put in its place" in raised(RuntimeError, run)

    def fail() -> None:
        with dmuon.as_sharded(model), torch.no_grad():
            model.layers[1].up_proj.weight.zero_()
            raise RuntimeError("boom")

    assert raised(RuntimeError, fail) == "boom"
    assert all(torch.equal(value, before[name]) for name, value in full_weights(model).items())
    loss_of(model, 0).backward()
    with torch.device("meta"):
        model = Model()
    dmuon.dedicate_params_ddp(model, make_mesh({"ddp": 2})["dp"], predicate=is_proj)
    with pytest.raises(RuntimeError, match=r"mix_proj\.weight is on the meta device"):
        dmuon.as_sharded(model).__enter__()


def test_what_cannot_be_taken_over(ranks):
    ranks(2, misuse)
