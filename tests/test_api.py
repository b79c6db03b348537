"""What cannot work is refused: on every rank, before any collective, with a name and a way out."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import dmuon
from models import (
    Block,
    InnerProducts,
    Transformer,
    agreed,
    build,
    dedicate,
    everything,
    full_weights,
    is_proj,
    loss_of,
    make_mesh,
    shard,
)

Q_PROJ = "layers.0.q_proj.weight"
Attempt = Callable[[], Any]


def refusal(
    shape: tuple[int, ...], prepare: Callable[[DeviceMesh], Attempt], together: bool
) -> tuple[str, str]:
    """The kind and the message of the exception that an attempt ends with on this rank.

    The ranks make their attempts one after the other, while the others wait: an attempt that needs another
    rank, even if only until it is refused, hangs or fails. `together` is for attempts that FSDP2 makes a
    collective of.
    """
    attempt = prepare(make_mesh(shape))
    found = ("nothing", "no exception")
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank() or together:
            try:
                attempt()
            except Exception as error:
                found = (type(error).__name__, str(error))
        if together:
            break
        dist.barrier()
    return found


def refused(
    ranks: Any,
    kind: str,
    words: list[str],
    prepare: Callable,
    shape: tuple[int, ...] = (2,),
    together: bool = False,
) -> None:
    """Assert that all ranks are refused, by an exception of this kind with these words in its message."""
    for found, message in ranks(math.prod(shape), refusal, shape, prepare, together, group_timeout=10):
        assert found == kind, message
        missing = [word for word in words if word not in message]
        assert not missing, f"{missing} not in: {message}"


def small_model() -> Transformer:
    return Transformer(depth=1)


# Nothing to dedicate


def predicate_matches_nothing(mesh: DeviceMesh) -> Attempt:
    return lambda: dedicate(small_model(), mesh, predicate=lambda name, param: "proj_" in name)


def model_without_hidden_matrices(mesh: DeviceMesh) -> Attempt:
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11))
    return lambda: dedicate(model, mesh)


def model_without_parameters(mesh: DeviceMesh) -> Attempt:
    return lambda: dedicate(nn.ReLU(), mesh)


def every_chosen_matrix_is_frozen(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    model.layers.requires_grad_(False)
    return lambda: dedicate(model, mesh, predicate=is_proj)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (predicate_matches_nothing, ["predicate matches no parameter", "predicate=", "embed.weight", Q_PROJ]),
        (model_without_hidden_matrices, ["no 2-D weight of a hidden layer", "predicate=", "0.weight"]),
        (model_without_parameters, ["no 2-D weight of a hidden layer", "no matrix"]),
        (every_chosen_matrix_is_frozen, ["frozen", Q_PROJ, "predicate="]),
    ],
)
def test_nothing_to_dedicate(ranks, prepare, words):
    refused(ranks, "ValueError", words, prepare)


def frozen_ones_are_left_out(shape: tuple[int, ...]) -> list[list[str]]:
    names = []
    for predicate in (None, is_proj):
        model = small_model()
        model.layers[0].q_proj.requires_grad_(False)
        names.append([record.param_name for record in dedicate(model, make_mesh(shape), predicate=predicate)])
    return names


def test_a_frozen_matrix_is_not_dedicated(ranks):
    for names in agreed(ranks, (2,), frozen_ones_are_left_out):
        assert Q_PROJ not in names
        assert "layers.0.k_proj.weight" in names


# Parameters that cannot be dedicated


def taken_by_fully_shard(mesh: DeviceMesh, after_forward: bool = False) -> Attempt:
    model = small_model()
    shard(model, mesh, reshard_after_forward=not after_forward)
    if after_forward:  # the parameters are whole again, and plain
        with torch.no_grad():
            loss_of(model, seed=0)
    return lambda: dedicate(model, mesh, predicate=is_proj)


def part_taken_by_fully_shard(mesh: DeviceMesh) -> Attempt:
    model = Transformer(depth=2)
    fully_shard(model.layers[1], mesh=mesh)
    return lambda: dedicate(model, mesh)


def tied(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    model.head.weight = model.embed.weight
    return lambda: dedicate(model, mesh, predicate=lambda name, param: "embed" in name)


def two_layers_share_a_matrix(mesh: DeviceMesh) -> Attempt:
    model = Transformer(depth=2)
    model.layers[1].o_proj = model.layers[0].o_proj
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    return lambda: dedicate(model, mesh, predicate=is_proj)


def vector(mesh: DeviceMesh) -> Attempt:
    return lambda: dedicate(small_model(), mesh, predicate=lambda name, param: "norm1" in name)


def convolution(mesh: DeviceMesh) -> Attempt:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 8))
    return lambda: dedicate(model, mesh, predicate=lambda name, param: name.endswith("weight"))


def complex_matrix(mesh: DeviceMesh) -> Attempt:
    model = nn.Linear(3, 3, dtype=torch.complex64)
    return lambda: dedicate(model, mesh, predicate=everything)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (taken_by_fully_shard, [Q_PROJ, "fully_shard", "dedicate_params, then"]),
        (functools.partial(taken_by_fully_shard, after_forward=True), [Q_PROJ, "dedicate_params, then"]),
        (part_taken_by_fully_shard, ["layers.1.q_proj.weight", "fully_shard", "dedicate_params, then"]),
        (tied, ["embed.weight", "tied", "predicate"]),
        (two_layers_share_a_matrix, [Q_PROJ, "tied", "predicate"]),
        (vector, ["layers.0.norm1.weight", "(6,)", "matrices"]),
        (convolution, ["0.weight", "depthwise convolution", "AdamW"]),
        (complex_matrix, ["weight", "complex64", "floating-point"]),
    ],
)
def test_a_parameter_that_cannot_be_dedicated(ranks, prepare, words):
    refused(ranks, "ValueError", words, prepare)


# A second call


def second_call(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    return lambda: dedicate(model, mesh, predicate=lambda name, param: name == "head.weight")


def call_on_the_whole_after_a_part(mesh: DeviceMesh) -> Attempt:
    model = Transformer(depth=2)
    dedicate(model.layers[0], mesh, predicate=is_proj)
    return lambda: dedicate(model, mesh, predicate=lambda name, param: name.startswith("layers.1.q_"))


def call_on_a_part_after_the_whole(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    return lambda: dedicate(model.layers[0], mesh, predicate=is_proj)


@pytest.mark.parametrize(
    "prepare", [second_call, call_on_the_whole_after_a_part, call_on_a_part_after_the_whole]
)
def test_a_second_call(ranks, prepare):
    refused(ranks, "ValueError", ["dedicate_params was already called", "once"], prepare)


def two_parts(mesh: DeviceMesh) -> Attempt:
    model = Transformer(depth=2)
    for layer in model.layers:
        dedicate(layer, mesh, predicate=is_proj)
    shard(model, mesh)
    return lambda: dmuon.Muon(model)


def test_muon_on_a_model_whose_parts_were_dedicated_one_by_one(ranks):
    refused(ranks, "ValueError", ["several parts", "once"], two_parts)


# Types


def with_arguments(good: DeviceMesh, /, **arguments: Any) -> Attempt:
    return lambda: dmuon.dedicate_params(**{"model": small_model(), "mesh": good, **arguments})


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"mesh": None}, "mesh"),
    ({"mesh": "dp"}, "mesh"),
    ({"mesh": 2}, "mesh"),
    ({"replicate_mesh": "replicate"}, "replicate_mesh"),
    ({"model": None}, "model"),
    ({"model": {"weight": torch.zeros(2, 2)}}, "model"),
    ({"predicate": "proj"}, "predicate"),
    ({"predicate": ["proj"]}, "predicate"),
    ({"reshard_after_forward": 2}, "reshard_after_forward"),
    ({"reshard_after_forward": "yes"}, "reshard_after_forward"),
    ({"mp_policy": torch.bfloat16}, "mp_policy"),
    ({"hook_boundary": "layers"}, "hook_boundary"),
    ({"hook_boundary": [Block]}, "hook_boundary"),
    ({"hook_boundary": torch.Tensor}, "hook_boundary"),
]


@pytest.mark.parametrize(
    ("arguments", "name"), WRONG_TYPES, ids=[f"{n}={a[n]!r:.20}" for a, n in WRONG_TYPES]
)
def test_arguments_of_another_type(ranks, arguments, name):
    refused(ranks, "TypeError", [name], functools.partial(with_arguments, **arguments))


@pytest.mark.parametrize("value", ["private", None, 3])
def test_process_groups_that_are_not_offered(ranks, value):
    prepare = functools.partial(with_arguments, process_groups=value)
    refused(ranks, "ValueError", ["process_groups", "isolated", "shared"], prepare)


def all_the_right_types(shape: tuple[int, ...]) -> None:
    mesh = make_mesh(shape)
    for arguments in (
        {"hook_boundary": Block},
        {"hook_boundary": (Block, nn.Embedding)},
        {"hook_boundary": lambda name, module: name == "layers"},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"process_groups": "shared"},
    ):
        assert len(dmuon.dedicate_params(small_model(), mesh, **arguments)) == 7


def test_arguments_of_the_right_types(ranks):
    ranks(2, all_the_right_types, (2,))


# Meshes


def mesh_of_three_dims(_: DeviceMesh) -> Attempt:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    return lambda: dmuon.dedicate_params(small_model(), mesh)


def hsdp_mesh_without_names(_: DeviceMesh) -> Attempt:
    mesh = init_device_mesh("cpu", (2, 2))
    return lambda: dmuon.dedicate_params(small_model(), mesh)


def replicate_mesh_without_names(_: DeviceMesh) -> Attempt:
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    unnamed = init_device_mesh("cpu", (4,))
    return lambda: dmuon.dedicate_params(small_model(), named, replicate_mesh=unnamed)


def shard_mesh_without_names(_: DeviceMesh) -> Attempt:
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    unnamed = init_device_mesh("cpu", (4,))
    return lambda: dmuon.dedicate_params(small_model(), unnamed, replicate_mesh=named)


def meshes_of_different_roots(mesh: DeviceMesh) -> Attempt:
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    return lambda: dmuon.dedicate_params(small_model(), other, replicate_mesh=mesh["replicate"])


def the_same_dim_twice(mesh: DeviceMesh) -> Attempt:
    return lambda: dmuon.dedicate_params(small_model(), mesh["shard"], replicate_mesh=mesh["shard"])


def two_dims_and_a_replicate_mesh(mesh: DeviceMesh) -> Attempt:
    return lambda: dmuon.dedicate_params(small_model(), mesh, replicate_mesh=mesh["replicate"])


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (mesh_of_three_dims, ["one dim", "3 dims", 'mesh["dp"]']),
        (hsdp_mesh_without_names, ["mesh_dim_names", "replicate", "shard"]),
        (replicate_mesh_without_names, ["replicate_mesh", "mesh_dim_names"]),
        (shard_mesh_without_names, ["mesh has no mesh_dim_names", "init_device_mesh"]),
        (meshes_of_different_roots, ["one root mesh", "'shard'", "'replicate'"]),
        (the_same_dim_twice, ["same mesh dim", "'shard'"]),
        (two_dims_and_a_replicate_mesh, ["one dim", "mesh has 2"]),
    ],
)
def test_meshes_that_do_not_fit(ranks, prepare, words):
    refused(ranks, "ValueError", words, prepare, shape=(2, 2))


def outside_the_mesh(shape: tuple[int, ...]) -> str | None:
    """What a rank is told that is not part of the mesh."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    try:
        dmuon.dedicate_params(small_model(), mesh)
    except ValueError as error:
        return str(error)
    return None


def test_a_rank_outside_the_mesh(ranks):
    messages = ranks(4, outside_the_mesh, (4,))
    assert messages[:2] == [None, None]
    for rank in (2, 3):
        assert f"rank {rank} is not part of" in messages[rank]


def other_meshes_that_fit(shape: tuple[int, ...]) -> list[list[Any]]:
    """The same model on meshes that are given in other ways: its owners each time."""
    two = make_mesh(shape)
    owners = []
    for mesh in ((two,), (two["shard"], two["replicate"])):
        arguments = dict(zip(("mesh", "replicate_mesh"), mesh, strict=False))
        records = dmuon.dedicate_params(small_model(), predicate=is_proj, **arguments)
        owners.append([record.owner for record in records])
    unnamed = init_device_mesh("cpu", (4,))
    model = small_model()
    records = dmuon.dedicate_params(model, unnamed, predicate=is_proj)
    shard(model, unnamed)
    optimizer = dmuon.Muon(model)
    loss_of(model, seed=dist.get_rank()).backward()
    optimizer.step()
    owners.append([record.owner for record in records])
    return owners


def test_meshes_may_be_given_whole_in_slices_or_unnamed(ranks):
    whole, sliced, unnamed = agreed(ranks, (2, 2), other_meshes_that_fit)
    assert whole == sliced
    assert all(isinstance(owner, int) for owner in unnamed)


# The optimizer


def muon_without_dedicate_params(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    shard(model, mesh)
    return lambda: dmuon.Muon(model)


def muon_with_cpu_offload(mesh: DeviceMesh) -> Attempt:
    model = Transformer()
    dedicate(model, mesh, predicate=is_proj)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return lambda: dmuon.Muon(model)


def muon_without_fully_shard(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    return lambda: dmuon.Muon(model)


def muon_with_one_parameter_unsharded(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    fully_shard(model.embed, mesh=mesh)
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    return lambda: dmuon.Muon(model)


def muon_with_a_bad_setting(mesh: DeviceMesh, **settings: Any) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    shard(model, mesh)
    return lambda: dmuon.Muon(model, **settings)


def fully_shard_after_a_parameter_was_replaced(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    model.layers[0].q_proj.weight = nn.Parameter(torch.zeros(6, 6))
    return lambda: shard(model, mesh)


@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (muon_without_dedicate_params, "ValueError", ["dedicate_params(model, mesh)"]),
        (muon_with_cpu_offload, "ValueError", ["CPUOffloadPolicy", "offload_policy"]),
        (muon_without_fully_shard, "ValueError", ["embed.weight", "fully_shard(model", "freeze"]),
        (muon_with_one_parameter_unsharded, "ValueError", ["norm.weight", "fully_shard(model", "freeze"]),
        (functools.partial(muon_with_a_bad_setting, lr=-1.0), "ValueError", ["lr"]),
        (functools.partial(muon_with_a_bad_setting, adamw_lr=-1.0), "ValueError", ["AdamW"]),
        (
            functools.partial(muon_with_a_bad_setting, param_groups=[{"params": ["nobody"]}]),
            "ValueError",
            ["nobody"],
        ),
        (fully_shard_after_a_parameter_was_replaced, "RuntimeError", [Q_PROJ, "in place"]),
    ],
)
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_an_optimizer_that_cannot_be_built(ranks, shape, prepare, kind, words):
    refused(ranks, kind, words, prepare, shape)


def mend_what_was_refused(shape: tuple[int, ...]) -> None:
    """A refusal leaves the model as it was: what the message asks for can be done, and then it trains."""
    model, mesh = small_model(), make_mesh(shape)
    with pytest.raises(ValueError, match="predicate"):
        dedicate(model, mesh, predicate=lambda name, param: False)
    with pytest.raises(ValueError, match="norm1"):
        dedicate(model, mesh, predicate=lambda name, param: "norm1" in name or is_proj(name, param))
    dedicate(model, mesh, predicate=is_proj)
    with pytest.raises(ValueError, match="fully_shard"):
        dmuon.Muon(model)
    shard(model, mesh)
    with pytest.raises(ValueError, match="lr"):
        dmuon.Muon(model, lr=-1.0)
    optimizer = dmuon.Muon(model)
    before = full_weights(model)
    loss_of(model, seed=dist.get_rank()).backward()
    optimizer.step()
    for name, weight in full_weights(model).items():
        trained = not torch.equal(weight, before[name])
        assert trained or name.endswith("norm1.bias") or "k_proj" in name, f"{name} is not trained"


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_what_was_refused_can_be_mended(ranks, shape):
    agreed(ranks, shape, mend_what_was_refused)


# Meshes that differ between dedicate_params and fully_shard


def dedicated_on_half_of_the_mesh(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dmuon.dedicate_params(model, mesh["shard"], predicate=is_proj)
    shard(model, mesh)
    return lambda: dmuon.Muon(model)


def sharded_on_half_of_the_mesh(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    shard(model, mesh["shard"])
    return lambda: dmuon.Muon(model)


@pytest.mark.parametrize("prepare", [dedicated_on_half_of_the_mesh, sharded_on_half_of_the_mesh])
def test_fully_shard_and_dedicate_params_on_different_ranks(ranks, prepare):
    refused(ranks, "ValueError", ["fully_shard", "dedicate_params", "mesh"], prepare, shape=(2, 2))


# Frameworks initialise and load through `named_parameters(recurse=False)`


def what_modules_show(shape: tuple[int, ...]) -> None:
    model = Transformer(depth=2)
    mesh = make_mesh(shape)
    dedicate(model, mesh, predicate=is_proj)
    shown = {name for name, _ in model.layers[0].q_proj.named_parameters(recurse=False)}
    assert shown == set()  # else fully_shard would take it
    assert Q_PROJ in dict(model.named_parameters())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
        assert not list(layer.q_proj.parameters(recurse=False))
    fully_shard(model, mesh=mesh)
    own = [param for module in model.modules() for param in module.parameters(recurse=False)]
    assert {id(param) for param in own} == {id(param) for param in model.parameters()}
    record = dmuon.get_dedicated_params(model)[0]
    assert dict(record.module.named_parameters(recurse=False)) == {"weight": record.resting}
    dmuon.Muon(model)
    loss_of(model, seed=0)
    assert dict(record.module.named_parameters(recurse=False)) == {"weight": record.resting}


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_dedicated_parameters_are_shown_once_the_root_is_wrapped(ranks, shape):
    ranks(2, what_modules_show, shape)


# Afterwards


def embedding_sharded_after_muon(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    dedicate(model, mesh, predicate=is_proj)
    optimizer = dmuon.Muon(model)
    fully_shard(model.embed, mesh=mesh)
    return optimizer.step


def dedicated_parameter_replaced_after_muon(mesh: DeviceMesh) -> Attempt:
    model = small_model()
    build(model, mesh)
    model.layers[0].q_proj.weight = nn.Parameter(torch.ones(6, 6))
    return lambda: loss_of(model, seed=0)


def still_on_meta(mesh: DeviceMesh) -> Attempt:
    with torch.device("meta"):
        model = InnerProducts([torch.zeros(4, 4)])
    build(model, mesh, predicate=everything)
    return lambda: model.layers[0](torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("prepare", "shape", "words"),
    [
        (embedding_sharded_after_muon, (1,), ["embed.weight", "fully_shard", "before dmuon.Muon"]),
        (dedicated_parameter_replaced_after_muon, (2,), [Q_PROJ, "in place"]),
        (still_on_meta, (2,), ["layers.0.weight", "meta", "to_empty"]),
    ],
)
def test_what_was_changed_behind_the_optimizer(ranks, prepare, shape, words):
    refused(ranks, "RuntimeError", words, prepare, shape, together=True)
