"""What goes wrong in a user's script, and would go unnoticed: refused by name, on every rank."""

import re

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import dmuon
from layouts import Model, Sizes, build, distribute, loss_of
from models import agreed

LAYOUTS = [pytest.param({"dp": 2}, id="dp2"), pytest.param({"ddp": 2}, id="ddp2")]


def raised(error: type[Exception], action, *args) -> str:
    with pytest.raises(error) as caught:
        action(*args)
    return str(caught.value)


def replace_module(model: nn.Module) -> None:
    model.layers[0].up_proj = nn.Linear(6, 13, bias=False)


def replace_before_muon(sizes: Sizes) -> str:
    model = Model()
    distribute(model, sizes)
    replace_module(model)
    return raised(RuntimeError, dmuon.Muon, model)


def replace_in_training(sizes: Sizes) -> str:
    model = Model()
    optimizer = build(model, sizes)
    loss_of(model, 0).backward()
    optimizer.step()
    replace_module(model)
    loss_of(model, 1).backward()
    return raised(RuntimeError, optimizer.step)


def remove_in_training(sizes: Sizes) -> bool:
    """A model may lose a layer: the rest goes on."""
    model = Model(depth=3)
    optimizer = build(model, sizes)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.layers = model.layers[:2]
    before = dmuon.full_tensor(model.layers[0].up_proj.weight).clone()
    loss_of(model, 1).backward()
    optimizer.step()
    return not torch.equal(before, dmuon.full_tensor(model.layers[0].up_proj.weight))


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_layer_may_be_removed(ranks, sizes):
    assert agreed(ranks, sizes, remove_in_training)


def delete_weight(sizes: Sizes) -> str:
    model = Model()
    distribute(model, sizes)
    del model.layers[0].up_proj.weight
    return raised(RuntimeError, dmuon.Muon, model)


def parametrize_weight(sizes: Sizes) -> str:
    model = Model()
    distribute(model, sizes)
    nn.utils.parametrize.register_parametrization(model.layers[0].up_proj, "weight", nn.Identity())
    return raised(RuntimeError, dmuon.Muon, model)


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (replace_before_muon, "its module is no longer a part of the model"),
        (replace_in_training, "its module is no longer a part of the model"),
        (delete_weight, "another parameter has been put in its place"),
        (parametrize_weight, "another parameter has been put in its place"),
    ],
)
def test_what_has_been_replaced_is_named(ranks, sizes, script, message):
    assert re.search(f"layers.0.up_proj.weight.*{message}", agreed(ranks, sizes, script))


def unnamed_mesh(sizes: Sizes) -> str:
    """One mesh without names for tensor parallelism and data parallelism."""
    model = Model()
    mesh = init_device_mesh("cpu", tuple(sizes.values()))
    weight = distribute_tensor(model.layers[0].up_proj.weight.detach(), mesh, [Shard(0)])
    model.layers[0].up_proj.weight = nn.Parameter(weight)
    return raised(ValueError, lambda: dmuon.dedicate_params(model, mesh))


def test_a_mesh_without_names_under_a_dtensor_is_refused(ranks):
    message = agreed(ranks, {"dp": 2}, unnamed_mesh)
    assert "layers.0.up_proj.weight" in message
    assert "mesh_dim_names" in message


def test_what_is_no_model_and_no_parameters_of_one():
    with pytest.raises(TypeError, match=r"the model itself is wanted, or its parameters.*not a int"):
        dmuon.Muon(3)
    with pytest.raises(ValueError, match="are of 0 models with dedicated parameters"):
        dmuon.Muon(torch.nn.Linear(2, 2).parameters())


def wrapped_weight(sizes: Sizes) -> str:
    model = Model()
    weight = model.layers[0].up_proj.weight.detach()
    model.layers[0].up_proj.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    return raised(ValueError, dmuon.dedicate_params, model, init_device_mesh("cpu", tuple(sizes.values())))


def test_a_weight_of_a_tensor_class_of_its_own_is_refused(ranks):
    assert agreed(ranks, {"dp": 1}, wrapped_weight).startswith("layers.0.up_proj.weight is a TwoTensor")
