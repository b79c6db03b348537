"""What goes wrong in a user's script, and would go unnoticed: refused by name, on every rank."""

import re
from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import dmuon
from layouts import Model, Sizes, build, dedicate_on, distribute, loss_of, make_mesh, parallelize
from models import agreed, is_proj

LAYOUTS = [pytest.param({"dp": 2}, id="dp2"), pytest.param({"ddp": 2}, id="ddp2")]


def raised(error: type[Exception], action, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        action(*args, **kwargs)
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
    with torch.no_grad():
        loss_of(model, 1)  # for an evaluation, say
    told = raised(RuntimeError, loss_of, model, 1)
    assert raised(RuntimeError, optimizer.step) == told
    return told


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


def replace_and_keep_weight(sizes: Sizes) -> str:
    """As quantization libraries do, before `fully_shard`."""
    model = Model()
    dedicate_on(model, sizes)
    old, new = model.layers[0].up_proj, nn.Linear(6, 13, bias=False, device="meta")
    new.weight = old.weight
    model.layers[0].up_proj = new
    mesh = make_mesh(sizes)["dp"]
    return raised(RuntimeError, partial(fully_shard, model.layers[0], mesh=mesh))


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
        (replace_and_keep_weight, "its module is no longer a part of the model"),
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


# Calls in another order


def late_calls(sizes: Sizes) -> dict[str, str]:
    """What each is told, on a mesh of dp and tp."""
    mesh = make_mesh(sizes)
    dp, told = mesh["dp"], {}
    for dedicate in (dmuon.dedicate_params, dmuon.dedicate_params_ddp):
        model = Model()
        dedicate(model, dp)
        told[f"parallelize after {dedicate.__name__}"] = raised(RuntimeError, parallelize, model, mesh)

    model = Model()
    dmuon.dedicate_params(model, dp)
    fully_shard(model, mesh=dp)
    told["layers after the model"] = raised(RuntimeError, lambda: fully_shard(model.layers[1], mesh=dp))
    dmuon.Muon(model)
    told["after Muon"] = raised(RuntimeError, lambda: fully_shard(model.layers[1], mesh=dp))

    model = Model()
    dmuon.dedicate_params(model, dp)
    model(torch.ones(2, 6))
    told["after a forward"] = raised(RuntimeError, lambda: fully_shard(model, mesh=dp))
    return told


def test_what_comes_too_late_is_named(ranks):
    told = agreed(ranks, {"dp": 2, "tp": 2}, late_calls)
    for call, message in told.items():
        parameter = "layers.1.mix_proj" if "layers" in call or "Muon" in call else "layers.0"
        assert message.startswith(parameter), call
        order = (
            "parallelize_module first, then dmuon.dedicate_params"
            if "parallelize" in call
            else "fully_shard of"
        )
        assert order in message, call


def meshes(_: Sizes) -> tuple[list[str], list[list[str]]]:
    """Meshes whose names say that they are not data-parallel; and who owns what on one that is flattened."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    told = [
        raised(ValueError, dmuon.dedicate_params, Model(), mesh["dp_replicate", "tp"]),
        raised(ValueError, dmuon.dedicate_params_ddp, Model(), mesh["tp"]),
        raised(ValueError, dmuon.dedicate_params, Model(), mesh["dp_shard"], replicate_mesh=mesh["tp"]),
    ]
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    flat, replicate = mesh["dp_shard", "cp"]._flatten("dp_shard_cp"), mesh["dp_replicate"]
    overlap = raised(ValueError, dmuon.dedicate_params, Model(), flat, replicate_mesh=mesh["dp_shard"])
    owned = []
    for model in (Model(), Model()):
        if owned:
            dmuon.dedicate_params(model, mesh["dp_replicate", "dp_shard"])
        else:
            dmuon.dedicate_params(model, flat, replicate_mesh=replicate)
            shard_on(model, DeviceMesh._concatenate([replicate, flat]))
            dmuon.Muon(model)
        owned.append([str(dmuon.get_owned_params(model, rank)) for rank in range(4)])
    return [*told, overlap], owned


def shard_on(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def test_meshes_by_name_and_flattened(ranks):
    (grid, line, replicas, overlap), (flattened, plain) = agreed(ranks, (2, 2), meshes)
    assert "'tp' is not data-parallel" in grid
    assert 'mesh["dp_replicate"], to' in grid
    assert "'tp' is not data-parallel" in line
    assert "'tp' is not data-parallel" in replicas
    assert "two dims of one root mesh" in overlap
    assert flattened == plain


# Other optimizers, and weights at rest


def train_with(make, sizes: Sizes) -> None:
    model = Model()
    distribute(model, sizes)
    optimizer = make([param for name, param in model.named_parameters() if is_proj(name, param)])
    loss_of(model, 0).backward()
    optimizer.step()


OTHERS = {
    "Muon": torch.optim.Muon,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=True),
}


def others(sizes: Sizes) -> dict[str, str]:
    return {name: raised(RuntimeError, train_with, make, sizes) for name, make in OTHERS.items()}


@pytest.mark.parametrize("sizes", [{"replicate": 2, "shard": 1}, {"ddp": 1, "tp": 2}], ids=str)
def test_other_optimizers_are_refused(ranks, sizes):
    for name, message in agreed(ranks, sizes, others).items():
        assert re.match(r"layers\.0\.\w+_proj\.weight is a dedicated parameter", message), name
        assert "train it with dmuon.Muon, no other optimizer" in message, name


def twins(sizes: Sizes) -> list[str]:
    """Averages of weights in models that lie otherwise, and of plain tensors."""
    model, other = Model(), Model()
    distribute(model, sizes)
    distribute(other, sizes, predicate=lambda name, _: name.endswith("up_proj.weight"))
    mine, theirs = model.layers[0].up_proj.weight, other.layers[1].up_proj.weight
    plain = torch.ones(13, 6)
    with torch.no_grad():
        told = [
            raised(RuntimeError, mine.copy_, plain),
            raised(RuntimeError, plain.copy_, mine),
            raised(
                RuntimeError, torch._foreach_copy_, [mine], [model.state_dict()["layers.0.up_proj.weight"]]
            ),
            raised(RuntimeError, model.layers[0].up_proj, torch.ones(2, 6)),
        ]
        owners = [dmuon.get_dedicated_params(m)[i].owner for m, i in ((model, 1), (other, 1))]
        assert owners[0] != owners[1], owners
        told += [
            raised(RuntimeError, mine.lerp_, theirs, 0.5),
            raised(RuntimeError, torch._foreach_lerp_, [mine], [theirs], 0.5),
        ]
    return told


def test_weights_of_another_layout_are_refused(ranks):
    for message in agreed(ranks, {"dp": 2}, twins):
        assert re.match(r"layers\.\d\.up_proj\.weight is a dedicated.*load_state_dict", message), message
