"""Tensor parallelism: the same update on whole matrices, whatever pieces the ranks hold."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import assert_weights_close, full_weights, mean_backward
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.runtime import find_runtime
from reference import ReferenceMuon

MESHES = [
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"dp": 4, "tp": 1}, id="dp4-tp1"),
    pytest.param({"dp": 1, "tp": 4}, id="dp1-tp4"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, id="hsdp2x1-tp2"),
    pytest.param({"replicate": 1, "shard": 2, "tp": 2}, id="hsdp1x2-tp2"),
    pytest.param({"replicate": 2, "shard": 2, "tp": 1}, id="hsdp2x2-tp1"),
]


class Layer(nn.Module):
    """Cut by rows (`up`, `gate`), by columns (`down`), replicated and plain matrices, in uneven pieces."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.gate_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_proj(self.norm(x))
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 13, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# Uneven pieces stay DTensors in between: torch could not tell their sizes from local tensors.
PLAN = {
    "up_proj": ColwiseParallel(use_local_output=False),
    "gate_proj": ColwiseParallel(use_local_output=False),
    "down_proj": RowwiseParallel(),
}


def is_proj(name: str, param: nn.Parameter) -> bool:
    return "proj" in name and param.ndim == 2


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: dict | None = None) -> None:
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan or PLAN)


def dedicate(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    if "replicate" in mesh.mesh_dim_names:
        kwargs["replicate_mesh"] = mesh["replicate"]
        dmuon.dedicate_params(model, mesh["shard"], predicate=is_proj, **kwargs)
    else:
        dmuon.dedicate_params(model, mesh["dp"], predicate=is_proj, **kwargs)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    dp = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)


def build(model: nn.Module, sizes: dict[str, int], *, reshard: bool = True, **muon: Any) -> dmuon.Muon:
    mesh = make_mesh(sizes)
    parallelize(model, mesh)
    dedicate(model, mesh, reshard_after_forward=reshard)
    shard(model, mesh)
    return dmuon.Muon(model, **muon)


def data_rank(sizes: dict[str, int]) -> tuple[int, int]:
    """This rank's number among the data-parallel ranks, and how many there are."""
    tp = sizes["tp"]
    return dist.get_rank() // tp, dist.get_world_size() // tp


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def train(
    sizes: dict[str, int], reshard: bool, asynchronous: bool, steps: int = 4
) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Model()
    oracle = copy.deepcopy(model)
    settings = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}
    reference = ReferenceMuon(oracle, is_proj, **settings)
    optimizer = build(model, sizes, reshard=reshard, replicate_async=asynchronous, **settings)
    mine, replicas = data_rank(sizes)
    weights = {}
    for step in range(steps):
        seeds = [100 * step + r for r in range(replicas)]
        for micro in range(1 + step % 2):  # every other step accumulates
            loss_of(model, seeds[mine] + 10 * micro).backward()
            mean_backward(oracle, loss_of, [seed + 10 * micro for seed in seeds])
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        weights = assert_weights_close(model, oracle)
    return weights


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("sizes", MESHES)
def test_training_equals_the_oracle(ranks, sizes, reshard):
    asynchronous = ranks(4, train, sizes, reshard, True)
    synchronous = ranks(4, train, sizes, reshard, False)
    for name, weight in asynchronous[0].items():
        assert torch.equal(weight, synchronous[0][name]), f"{name}: asynchronous publish changes the training"


def inspect(sizes: dict[str, int]) -> list[dict[str, Any]]:
    model = Model()
    build(model, sizes)
    rank = dist.get_rank()
    return [
        {
            "name": dp.param_name,
            "local": tuple(dp._orig_size),
            "full": tuple(dp.full_shape),
            "shard_dim": dp.shard_dim,
            "is_tp_owner": dp.is_tp_owner,
            "tp_group_size": dp.tp_group.size() if dp.tp_group else 1,
            "owner_rank": dp.owner_rank,
        }
        for dp in dmuon.get_owned_params(model, rank=rank)
    ]


def test_inspection(ranks):
    results = ranks(4, inspect, {"dp": 2, "tp": 2})
    for row in ((0, 1), (2, 3)):
        first, second = (results[r] for r in row)
        assert [d["name"] for d in first] == [d["name"] for d in second]
        for a, b in zip(first, second, strict=True):
            cut = "mix" not in a["name"]
            assert a["tp_group_size"] == (2 if cut else 1)
            assert a["shard_dim"] == (None if not cut else 1 if "down" in a["name"] else 0)
            if cut:
                assert a["is_tp_owner"] + b["is_tp_owner"] == 1
                assert a["owner_rank"] == b["owner_rank"] == row[0 if a["is_tp_owner"] else 1]
                dim = a["shard_dim"]
                assert a["local"][dim] + b["local"][dim] == a["full"][dim] == 13
    names = [d["name"] for r in (0, 2) for d in results[r]]
    assert sorted(names) == sorted(n for n, p in Model().named_parameters() if is_proj(n, p))


def test_every_mesh_gives_the_same_weights(ranks):
    expected = ranks(4, weights_on_the_same_data, {"dp": 1, "tp": 4})[0]
    for sizes in ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"replicate": 2, "shard": 1, "tp": 2}):
        for name, weight in ranks(4, weights_on_the_same_data, sizes)[0].items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


def weights_on_the_same_data(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Model()
    optimizer = build(model, sizes)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def test_tensor_parallelism_over_one_rank_is_none(ranks):
    """Bitwise equal to the mesh without the dim."""
    with_dim = ranks(4, weights_on_the_same_data, {"dp": 4, "tp": 1})[0]
    without = ranks(4, weights_without_tp)[0]
    for name, weight in with_dim.items():
        assert torch.equal(weight, without[name]), name


def weights_without_tp() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Model()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh["dp"], predicate=is_proj)
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def count(sizes: dict[str, int]) -> dict[str, int]:
    model = Model(width=8, hidden=16)
    optimizer = build(model, sizes)
    runtime = find_runtime(model)
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        runtime.traffic.reset()
        optimizer.step()
        optimizer.zero_grad()
    runtime.wait_published()
    model(torch.ones(3, 8)).sum().backward()
    return runtime.traffic.collectives | {
        "rows": sum(b.is_cut and b.in_owner_row for g in runtime.groups for b in g.buckets)
    }


def test_one_exchange_per_owner_row_and_group(ranks):
    for seen in ranks(4, count, {"dp": 2, "tp": 2}):
        assert seen["rows"] > 0
        assert seen["exchange"] == seen["publish_exchange"] == seen["rows"]
