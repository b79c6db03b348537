"""What one can see of the plan: records, owners, the summary, whole values; and that the plan is balanced."""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dmuon
from models import (
    Transformer,
    agreed,
    assert_ranks_equal,
    build,
    dedicate,
    full_weights,
    is_proj,
    loss_of,
    make_mesh,
    shard,
)

MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2,), (1,)]
MATRICES = [name for name, param in Transformer().named_parameters() if is_proj(name, param)]

# Records


def describe(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every record as a plain dict; and what must hold of each on this rank."""
    model, mesh = Transformer(), make_mesh(shape)
    returned = dedicate(model, mesh, predicate=is_proj)
    shard(model, mesh)
    records = dmuon.get_dedicated_params(model)
    assert records == returned
    assert dmuon.get_dedicated_params(nn.ModuleDict({"wrapped": model})) == records
    named = dict(model.named_parameters())
    assert dmuon.dedicated_parameters(model) == {named[record.param_name] for record in records}
    rank = dist.get_rank()
    coordinate = mesh.get_coordinate()
    described = []
    for record in records:
        # A rank is the owner where its own coordinate on the mesh is the record's.
        owner = (record.owner,) if isinstance(record.owner, int) else record.owner[::-1]
        assert record.is_owner == (list(owner) == list(coordinate))
        assert record.is_tp_owner  # of a row of one rank
        assert record.is_owner == (record.owner_rank == rank)
        # Every rank of the owner's column keeps the weight, whole; nobody else keeps any of it.
        local = named[record.param_name].to_local()
        keeps = coordinate[-1] == owner[-1]
        assert tuple(local.shape) == (tuple(record.full_shape) if keeps else (0, record.full_shape[1]))
        assert named[record.param_name].shape == record.full_shape
        described.append(
            {
                "param_name": record.param_name,
                "full_shape": tuple(record.full_shape),
                "original": tuple(record._orig_size),
                "owner": record.owner,
                "owner_rank": record.owner_rank,
                "tensor_parallel": (record.shard_dim, record.tp_group),
            }
        )
    return described


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_records(ranks, shape):
    records = agreed(ranks, shape, describe)
    assert [record["param_name"] for record in records] == MATRICES  # in module order
    shapes = {name: tuple(param.shape) for name, param in Transformer().named_parameters()}
    for record in records:
        assert record["full_shape"] == record["original"] == shapes[record["param_name"]]
        assert record["tensor_parallel"] == (None, None)
        if len(shape) == 1:
            assert record["owner"] == record["owner_rank"] < shape[0]
        else:
            column, row = record["owner"]  # (shard, replicate)
            assert (row, column) == divmod(record["owner_rank"], shape[1])
            assert row < shape[0]


def owned_by_rank(shape: tuple[int, ...]) -> list[list[str]]:
    model = Transformer()
    dedicate(model, make_mesh(shape), predicate=is_proj)
    for record in dmuon.get_owned_params(model, dist.get_rank()):
        assert record.is_owner
    world = dist.get_world_size()
    return [[r.param_name for r in dmuon.get_owned_params(model, rank)] for rank in range(world)]


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)], ids=str)
def test_every_matrix_is_owned_by_one_rank(ranks, shape):
    owned = agreed(ranks, shape, owned_by_rank)
    assert sorted(name for names in owned for name in names) == sorted(MATRICES)
    assert all(names == [name for name in MATRICES if name in names] for names in owned)
    assert all(owned), "a rank owns nothing"


def test_a_model_without_dedicated_parameters():
    for look in (
        dmuon.get_dedicated_params,
        dmuon.dedicated_parameters,
        dmuon.summary,
        lambda model: dmuon.get_owned_params(model, 0),
    ):
        with pytest.raises(ValueError, match="dedicate_params"):
            look(Transformer())


# The summary


def summaries(shape: tuple[int, ...]) -> dict[str, Any]:
    """The table, what was logged and at which level, and the owners."""
    model = Transformer()
    model.layers[0].norm2.requires_grad_(False)
    model.layers[1].q_proj.requires_grad_(False)
    logged: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("dmuon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        optimizer = build(model, make_mesh(shape))
        loss_of(model, seed=dist.get_rank()).backward()
        optimizer.step()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    owners = {record.param_name: record.owner_rank for record in dmuon.get_dedicated_params(model)}
    named = dict(model.named_parameters())
    group_of = {
        name: group["algorithm"]
        for group in optimizer.param_groups
        for name in named
        if any(named[name] is param for param in group["params"])
    }
    return {"table": dmuon.summary(model), "logged": logged, "owners": owners, "algorithms": group_of}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_the_summary_says_where_every_trainable_parameter_went(ranks, shape, capfd):
    found = agreed(ranks, shape, summaries)
    table = found["table"]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line}
    frozen = {"layers.0.norm2.weight", "layers.0.norm2.bias", "layers.1.q_proj.weight"}
    frozen.add("layers.1.q_proj.bias")
    for name, param in Transformer().named_parameters():
        if name in frozen:
            assert name not in rows
            continue
        row = rows[name]
        assert "x".join(map(str, param.shape)) in row
        assert found["algorithms"][name] in row
        assert ("muon" in row) == (name in found["owners"])
        if name in found["owners"]:
            assert f"rank {found['owners'][name]}" in " ".join(row)
        assert row[-1] == f"{4 * param.numel():,}"
    nbytes = {"muon": 0, "adamw": 0}
    for name, param in Transformer().named_parameters():
        if name not in frozen:
            nbytes[found["algorithms"][name]] += 4 * param.numel()
    assert f"muon: {len(found['owners'])} matrices, {nbytes['muon']:,} bytes, on 4 of 4 ranks" in table
    assert f"adamw: {nbytes['adamw']:,} bytes" in table
    assert "balance" in table
    assert found["logged"] == [(logging.INFO, table)]
    assert "balance" not in capfd.readouterr().out  # nothing is printed, on no rank


# Whole values


def whole_values(shape: tuple[int, ...], reshard: bool, asynchronous: bool) -> None:
    """Before, between and after steps, in either way to ask, from parameters of every kind."""
    model = Transformer(depth=1)
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = build(model, make_mesh(shape), reshard_after_forward=reshard, replicate_async=asynchronous)
    values = full_weights(model)
    for name, param in model.named_parameters():
        assert torch.equal(values[name], first[name]), name
        assert torch.equal(param.full_tensor().detach(), first[name]), name
        assert values[name].dtype == param.dtype
    for step in range(2):
        loss_of(model, seed=10 * step + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = full_weights(model)  # with asynchronous publish, before any other reader
        assert_ranks_equal(after)
        for record in dmuon.get_dedicated_params(model):
            assert not torch.equal(after[record.param_name], values[record.param_name]), record
            if record.is_owner:
                assert torch.equal(record.local, after[record.param_name])
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor().detach(), after[name]), name
        values = after


@pytest.mark.always("(2, 2)", "(1,)")
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_full_tensor(ranks, shape):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    ranks(world, whole_values, shape, True, True)
    ranks(world, whole_values, shape, False, False)


def values_of_owners(shape: tuple[int, ...]) -> dict[str, tuple[int, torch.Tensor, torch.Tensor]]:
    """With other weights on each rank: by name the owner's rank, the whole value, and what we began with."""
    torch.manual_seed(dist.get_rank())
    model = Transformer(depth=1)
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    records = dedicate(model, make_mesh(shape), predicate=is_proj)
    return {
        record.param_name: (
            record.owner_rank,
            dmuon.full_tensor(record.resting).detach(),
            first[record.param_name],
        )
        for record in records
    }


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_the_value_is_the_owners(ranks, shape):
    found = ranks(4, values_of_owners, shape)
    for name, (owner, _, _) in found[0].items():
        expected = found[owner][name][2]
        for rank in range(4):
            assert found[rank][name][0] == owner
            assert torch.equal(found[rank][name][1], expected), name
            assert rank == owner or not torch.equal(found[rank][name][2], expected)


def parameters_of_every_dtype(shape: tuple[int, ...]) -> None:
    model = Transformer(depth=2)
    model.layers[0].to(torch.float64)
    model.layers[1].to(torch.bfloat16)
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    dedicate(model, make_mesh(shape), predicate=is_proj)
    for name, param in model.named_parameters():
        value = dmuon.full_tensor(param)
        assert value.dtype == first[name].dtype
        assert torch.equal(value, first[name])
    plain = torch.randn(3)
    assert dmuon.full_tensor(plain) is plain


def test_full_tensor_keeps_the_dtype(ranks):
    ranks(4, parameters_of_every_dtype, (4,))


def outlive_the_model(shape: tuple[int, ...]) -> None:
    model = Transformer(depth=1)
    dedicate(model, make_mesh(shape), predicate=is_proj)
    param = model.layers[0].q_proj.weight
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="model"):
        dmuon.full_tensor(param)


def test_a_parameter_that_has_lost_its_model(ranks):
    ranks(2, outlive_the_model, (2,))


# Balance


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A world of eight in which this process is rank 0 and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    """The four matrices of a GPT-2 layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def in_list(path: str) -> nn.Module:
    """48 layers in a list at this path."""
    model: nn.Module = nn.ModuleList(Layer(768) for _ in range(48))
    for name in reversed(path.split(".")):
        model = nn.ModuleDict({name: model})
    return model


def in_sequence() -> nn.Module:
    return nn.Sequential(*(Layer(768) for _ in range(48)))


def in_no_list() -> nn.Module:
    """48 layers whose names have no number and are not in order."""
    model = nn.Module()
    for index in range(48):
        letters = f"{chr(ord('z') - index % 26)}{'aeiou'[index // 26]}"
        setattr(model, f"part_{letters}", Layer(768))
    return model


MODELS = {
    "layers": lambda: in_list("layers"),
    "transformer.h": lambda: in_list("transformer.h"),
    "encoder.blocks": lambda: in_list("encoder.blocks"),
    "deep": lambda: in_list("a.b.c.layers_of_the_layer"),
    "sequence": in_sequence,
    "no_list": in_no_list,
}


def mesh_of_eight(hsdp: bool) -> DeviceMesh:
    if hsdp:
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))


def owners_of(name: str, mesh: DeviceMesh) -> list[tuple[int, torch.Size]]:
    """Owner's rank and shape of every matrix."""
    with torch.device("meta"):
        model = MODELS[name]()
    records = dedicate(model, mesh, predicate=lambda name, param: param.ndim == 2)
    assert len(records) == 4 * 48
    return [(record.owner_rank, record.full_shape) for record in records]


@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_owners_are_balanced_whatever_the_names(eight_ranks, name, hsdp):
    loads = [0] * 8
    elements = [0] * 8
    for owner, (rows, cols) in owners_of(name, mesh_of_eight(hsdp)):
        loads[owner] += min(rows, cols) ** 2 * max(rows, cols)  # what every iteration costs, up to a factor
        elements[owner] += rows * cols
    assert max(loads) <= 1.05 * sum(loads) / 8
    assert max(elements) <= 1.1 * sum(elements) / 8


@pytest.mark.parametrize("hsdp", [False, True], ids=["fsdp", "hsdp"])
def test_owners_do_not_depend_on_names(eight_ranks, hsdp):
    owners = {name: owners_of(name, mesh_of_eight(hsdp)) for name in MODELS if name != "no_list"}
    assert all(of_one == owners["layers"] for of_one in owners.values())


def test_a_layer_has_several_owners(eight_ranks):
    """Else all of its broadcasts would come from one rank, one after the other."""
    owners = [owner for owner, _ in owners_of("layers", mesh_of_eight(hsdp=False))]
    spread = [len(set(owners[4 * layer : 4 * layer + 4])) for layer in range(48)]
    assert sum(spread) / 48 > 1.5
