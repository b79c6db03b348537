"""Tensor parallelism: the same update on whole matrices, whatever pieces the ranks hold."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dmuon
from dmuon.engine.exchange import Cut, Exchange, whole_at
from dmuon.engine.layout import root_mesh
from dmuon.engine.runtime import find_runtime
from dmuon.engine.tensor_parallel import TensorParallel, _slices
from layouts import Model, build, data_rank, is_proj, loss_of, make_mesh, parallelize, shard
from models import (
    assert_ranks_equal,
    assert_weights_close,
    full_weights,
    mean_backward,
    step_both,
    with_oracle,
)
from reference import ReferenceMuon

pytestmark = pytest.mark.always("dp2-tp2", "hsdp2x1-tp2-True", "ddp2-tp2")

MESHES = [
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"dp": 4, "tp": 1}, id="dp4-tp1"),
    pytest.param({"dp": 1, "tp": 4}, id="dp1-tp4"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, id="hsdp2x1-tp2"),
    pytest.param({"replicate": 1, "shard": 2, "tp": 2}, id="hsdp1x2-tp2"),
    pytest.param({"replicate": 2, "shard": 2, "tp": 1}, id="hsdp2x2-tp1"),
]
DDP_MESHES = [
    pytest.param({"ddp": 4}, id="ddp4"),
    pytest.param({"ddp": 2, "tp": 2}, id="ddp2-tp2"),
    pytest.param({"ddp": 1, "tp": 4}, id="ddp1-tp4"),
]


def train(
    sizes: dict[str, int], steps: int = 3, *, reshard: bool = True, clip: float | None = None, **muon: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Model()
    oracle = copy.deepcopy(model)
    settings = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}
    reference = ReferenceMuon(oracle, is_proj, **settings)
    optimizer = build(model, sizes, reshard=reshard, **muon, **settings)
    mine, replicas = data_rank(sizes)
    weights = {}
    for step in range(steps):
        seeds = [100 * step + r for r in range(replicas)]
        for micro in range(1 + step % 2):  # every other step accumulates
            loss_of(model, seeds[mine] + 10 * micro).backward()
            mean_backward(oracle, loss_of, [seed + 10 * micro for seed in seeds])
        if clip is not None:
            norm = dmuon.clip_grad_norm_(model, clip)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), clip)
            torch.testing.assert_close(norm, expected, atol=1e-6, rtol=1e-5)
        step_both(optimizer, reference)
        weights = assert_weights_close(model, oracle)
        for name, param in oracle.named_parameters():  # orthogonalization would hide a wrong scale
            if param in reference.buffers:
                momentum = whole_momentum(model, optimizer, name)
                assert (momentum - reference.buffers[param]).abs().max() < 1e-6, name
    return weights


def whole_momentum(model: nn.Module, optimizer: dmuon.Muon, name: str) -> torch.Tensor:
    """The momentum, whole, from the parts that the ranks keep; every part is kept once."""
    (param,) = (p for p in dmuon.get_dedicated_params(model) if p.param_name == name)
    local = optimizer.state[param.resting]["momentum_buffer"]._local_tensor
    whole, kept = torch.zeros(param.full_shape), torch.zeros(param.full_shape)
    if param.keeps_state:
        where = param.part if param.has_team else ()
        whole[where] += local
        kept[where] += 1
    dist.all_reduce(whole)
    dist.all_reduce(kept)
    copies = 1 if param.is_cut or param.tp is None else param.tp.mesh.size()  # replicated over the TP mesh
    if param.tp is None and "tp" in (root_mesh(param.layout.mesh).mesh_dim_names or ()):
        copies = dist.get_world_size() // param.layout.size
    assert (kept == copies).all()
    return whole / copies


@pytest.mark.always("dp2-tp2-True", "hsdp2x1-tp2-False", "ddp2-tp2")
@pytest.mark.parametrize(
    ("sizes", "reshard"),
    [
        pytest.param(*mesh.values, reshard, id=f"{mesh.id}-{reshard}")
        for mesh in MESHES
        for reshard in (True, False)
    ]
    + [pytest.param(*mesh.values, True, id=mesh.id) for mesh in DDP_MESHES],  # where it has no meaning
)
def test_training_equals_the_oracle(ranks, sizes, reshard):
    same_if_synchronous(ranks, sizes, reshard=reshard)


def same_if_synchronous(ranks: Any, sizes: dict[str, int], **kwargs: Any) -> None:
    """Each equal to the oracle, and bitwise equal to each other."""
    asynchronous = ranks(4, train, sizes, **kwargs)
    synchronous = ranks(4, train, sizes, replicate_async=False, **kwargs)
    for name, weight in asynchronous[0].items():
        assert torch.equal(weight, synchronous[0][name]), f"{name}: asynchronous publish changes the training"


TP_MESHES = [
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"dp": 1, "tp": 4}, id="dp1-tp4"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, id="hsdp2x1-tp2"),
    pytest.param({"ddp": 2, "tp": 2}, id="ddp2-tp2"),
]


@pytest.mark.always("hsdp2x1-tp2")
@pytest.mark.parametrize("sizes", TP_MESHES)
def test_training_with_clipping(ranks, sizes):
    same_if_synchronous(ranks, sizes, clip=0.01)


@pytest.mark.always("dp2-tp2-0.01", "ddp2-tp2-None")
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("sizes", TP_MESHES)
def test_training_with_teams(ranks, sizes, clip):
    teams = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}
    same_if_synchronous(ranks, sizes, clip=clip, **teams)


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


@pytest.mark.always("(3, 5)")
@pytest.mark.parametrize("shape", [(6, 13), (3, 5)], ids=str)  # 5 over 4 ranks: the last has nothing
def test_every_mesh_gives_the_same_weights(ranks, shape):
    oracle = model_of(shape)
    reference = ReferenceMuon(oracle, is_proj)
    for step in range(3):
        same_data(oracle, step).backward()
        reference.step()
        reference.zero_grad()
    for sizes in (
        {"dp": 1, "tp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 4, "tp": 1},
        {"replicate": 2, "shard": 1, "tp": 2},
        {"replicate": 2, "shard": 2},
        {"ddp": 4},
        {"ddp": 2, "tp": 2},
        {"ddp": 1, "tp": 4},
    ):
        weights = ranks(4, weights_on_the_same_data, sizes, shape)[0]
        for name, weight in oracle.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), atol=1e-5, rtol=0)


def model_of(shape: tuple[int, int]) -> Model:
    torch.manual_seed(1)
    model = Model(*shape)
    if shape[1] < 8:
        for layer in model.layers:
            layer.gate_proj.bias = None  # FSDP2 itself fails where a rank has no piece of one
    return model


def same_data(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, model.head.in_features, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def weights_on_the_same_data(
    sizes: dict[str, int], shape: tuple[int, int] = (6, 13)
) -> dict[str, torch.Tensor]:
    model = model_of(shape)
    optimizer = build(model, sizes)
    for step in range(3):
        same_data(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = full_weights(model)
    assert_ranks_equal(weights)
    return weights


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
    optimizer.synchronize()
    model(torch.ones(3, 8)).sum().backward()
    return runtime.traffic.collectives | {
        "groups": sum(any(p.is_cut and p.in_owner_row for p in group.params) for group in runtime.groups)
    }


def test_one_exchange_per_owner_row_and_group(ranks):
    for seen in ranks(4, count, {"dp": 2, "tp": 2}):
        assert seen["groups"] > 0
        assert seen["exchange"] == seen["publish_exchange"] == seen["groups"]


def cut_over_data_parallel_ranks(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    mesh = make_mesh(sizes)["dp"]
    for layer in model.layers:
        for linear in (layer.up_proj, layer.down_proj):
            weight = distribute_tensor(linear.weight.detach(), mesh, [Shard(1)])
            linear.weight = nn.Parameter(weight)
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model)
    mine, replicas = data_rank(sizes)
    for step in range(2):
        loss_of(model, step + mine).backward()
        mean_backward(oracle, loss_of, [step + r for r in range(replicas)])
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", [{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}], ids=str)
def test_a_dtensor_over_data_parallel_dims_is_the_whole_tensor(ranks, sizes):
    ranks(4, cut_over_data_parallel_ranks, sizes)


def refusals() -> list[str]:
    """Each is raised on every rank, before any collective: nothing hangs here."""
    messages = []

    def refused(model: nn.Module, mesh: DeviceMesh, match: str = r"layers\.0\.") -> None:
        with pytest.raises(ValueError, match=match) as caught:
            dmuon.dedicate_params(model, mesh, predicate=is_proj)
        messages.append(str(caught.value))

    mesh = make_mesh({"dp": 2, "tp": 2})
    model = Model()
    parallelize(model, mesh)
    refused(model, mesh["dp", "tp"], "mesh has the dims")  # the tensor-parallel one among them
    refused(model, init_device_mesh("cpu", (4,), mesh_dim_names=("other",)))  # another root
    unnamed = init_device_mesh("cpu", (2, 2))
    model = Model()
    for layer in model.layers:
        weight = distribute_tensor(layer.up_proj.weight.detach(), unnamed, [Replicate(), Shard(0)])
        layer.up_proj.weight = nn.Parameter(weight)
    refused(model, mesh["dp"])
    model = Model()
    weight = DTensor.from_local(torch.ones(6, 6), mesh["tp"], [Partial()], run_check=False)
    model.layers[0].mix_proj.weight = nn.Parameter(weight)
    refused(model, mesh["dp"])
    model = Model()
    parallelize(model, mesh)
    shard(model, mesh)
    refused(model, mesh["dp"])
    return messages


def test_what_does_not_fit_is_refused_by_name(ranks):
    results = ranks(4, refusals)
    assert all(messages == results[0] for messages in results)
    overlapping, other_root, unnamed, partial, sharded = results[0]
    assert "'tp'" in overlapping
    assert 'mesh["dp"]' in overlapping
    assert "another root" in other_root
    assert "mesh_dim_names" in unnamed
    assert "Partial" in partial
    assert "dedicate_params, then fully_shard" in sharded


# More than one tensor-parallel dim, any dims, empty pieces

CUTS = {
    "rows twice": [Shard(0), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
    "columns and rows": [Shard(1), Shard(0)],
    "one of two": [Replicate(), Shard(1)],
    "replicated": [Replicate(), Replicate()],
}


class Bag(nn.Module):
    """Matrices that are used whole, so that any cut of them will do."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole(shape) for shape in shapes)

    def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
        return sum(
            (layer(target) for layer, target in zip(self.layers, targets, strict=True)), torch.zeros(())
        )


class Whole(nn.Module):
    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.w_proj = nn.Parameter(torch.randn(shape))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        weight = self.w_proj.full_tensor() if isinstance(self.w_proj, DTensor) else self.w_proj
        return (weight * target).sum()


def any_cut(sizes: dict[str, int], shapes: list[tuple[int, int]], cuts: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    model = Bag(shapes)
    oracle = copy.deepcopy(model)
    reference = ReferenceMuon(oracle, is_proj, weight_decay=0.1)
    mesh = make_mesh(sizes)
    for layer, cut in zip(model.layers, cuts, strict=True):
        weight = distribute_tensor(layer.w_proj.detach(), mesh["tp1", "tp2"], CUTS[cut])
        layer.w_proj = nn.Parameter(weight)
    dmuon.dedicate_params(model, mesh["dp"], predicate=is_proj)
    optimizer = dmuon.Muon(model, weight_decay=0.1)
    dp, mine = sizes["dp"], mesh.get_coordinate()[0]

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return m([torch.randn(shape, generator=generator) for shape in shapes])

    for step in range(3):
        loss(model, 100 * step + mine).backward()
        mean_backward(oracle, loss, [100 * step + rank for rank in range(dp)])
        for record in dmuon.get_dedicated_params(model):
            if record.is_owner:
                expected = oracle.get_parameter(record.param_name).grad
                torch.testing.assert_close(record.local_gradient(), expected, atol=1e-6, rtol=1e-5)
            else:
                assert record.local_gradient().numel() == 0
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.sampled_from(
        [{"dp": 2, "tp1": 2, "tp2": 1}, {"dp": 1, "tp1": 2, "tp2": 2}, {"dp": 2, "tp1": 1, "tp2": 2}]
    ),
    matrices=st.lists(
        st.tuples(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.sampled_from(sorted(CUTS))),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 100),
)
def test_any_cut_of_any_shape(ranks, sizes, matrices, seed):
    shapes, cuts = (list(column) for column in zip(*matrices, strict=True))
    ranks(4, any_cut, sizes, shapes, cuts, seed)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    matrices=st.lists(
        st.tuples(
            st.integers(0, 7), st.integers(0, 7), st.integers(0, 1), st.integers(0, 1), st.integers(-2, 15)
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_the_exchange_is_its_own_inverse(sizes, matrices):
    """Carried out by hand between all positions, on matrices whose elements say where they belong; each is
    kept by one position or, where the owner is negative, by all, cut along one dim."""
    positions = list(itertools.product(*map(range, sizes)))
    world = len(positions)
    fulls, cuts = [], []
    for number, (rows, cols, first, second, owner) in enumerate(matrices):
        full = torch.arange(rows * cols).view(rows, cols) + 1000 * number
        dims = (first, second)[: len(sizes)]
        pieces = tuple(
            _slices(full.shape, [(d, n, i) for d, n, i in zip(dims, sizes, where, strict=True)])
            for where in positions
        )
        shared = tuple(_slices(full.shape, [(owner % 2, world, i)]) for i in range(world))
        parts = shared if owner < 0 else whole_at(owner % world, world, full.shape)
        fulls.append(full)
        cuts.append(Cut(full.shape, pieces, parts))

    plans = [Exchange(cuts, position) for position in range(world)]
    pieces_at, parts_at = (
        [
            [f[getattr(cut, kind)[position]] for f, cut in zip(fulls, cuts, strict=True)]
            for position in range(world)
        ]
        for kind in ("pieces", "parts")
    )
    sends = []
    for plan, pieces in zip(plans, pieces_at, strict=True):
        send = torch.empty(sum(plan.piece_splits), dtype=torch.int64)
        plan.pack_pieces(pieces, send)
        sends.append(send.split(plan.piece_splits))
    kept = []
    for position, plan in enumerate(plans):
        parts = [sends[source][position] for source in range(world)]
        assert [len(part) for part in parts] == plan.part_splits
        kept.append(plan.unpack_parts(torch.cat(parts)))
        assert all(torch.equal(a, b) for a, b in zip(kept[-1], parts_at[position], strict=True))
    back = []
    for plan, parts in zip(plans, kept, strict=True):
        send = torch.empty(sum(plan.part_splits), dtype=torch.int64)
        plan.pack_parts([part if part.numel() else None for part in parts], send)
        back.append(send.split(plan.part_splits))
    for position, plan in enumerate(plans):
        received = plan.unpack_pieces(torch.cat([back[source][position] for source in range(world)]))
        assert all(torch.equal(a, b) for a, b in zip(received, pieces_at[position], strict=True))


def pieces_are_torchs(shape: tuple[int, int], cut: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp1", "tp2"))
    full = torch.arange(shape[0] * shape[1]).view(shape)
    tensor = distribute_tensor(full, mesh, CUTS[cut])
    tp = TensorParallel.of(tensor)
    assert torch.equal(full[tp.pieces[tp.position]], tensor.to_local())
    assert tp.ranks[tp.position] == dist.get_rank()
    assert tp.piece_shape == tensor.to_local().shape


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", [(5, 3), (1, 8), (2, 1), (4, 4)], ids=str)
def test_pieces_are_those_of_torch(ranks, shape, cut):
    ranks(4, pieces_are_torchs, shape, cut)


# Checkpoints


def compare_with_fsdp2(sizes: dict[str, int], hidden: int) -> None:
    torch.manual_seed(1)
    plain = Model(hidden=hidden)
    model, other = copy.deepcopy(plain), Model(hidden=hidden)
    mesh = make_mesh(sizes)
    build(model, sizes)
    build(other, sizes)
    parallelize(plain, mesh)
    shard(plain, mesh)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        value = ours[name]
        assert value.shape == expected.shape
        assert value.placements == expected.placements, (name, value.placements, expected.placements)
        assert value.device_mesh == expected.device_mesh
        assert torch.equal(value.to_local(), expected.to_local()), name
    if hidden % 4:
        return  # torch itself cannot distribute a full tensor over uneven strided shards
    full = get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    for name, weight in full_weights(other).items():
        assert torch.equal(weight, full[name]), name


@pytest.mark.parametrize("hidden", [13, 16])
@pytest.mark.parametrize("sizes", MESHES)
def test_the_models_state_dict_is_fsdp2s(ranks, sizes, hidden):
    ranks(4, compare_with_fsdp2, sizes, hidden)


def save_and_resume(sizes: dict[str, int], others: dict[str, int], path: str) -> None:
    torch.manual_seed(1)
    model = Model(hidden=16)
    optimizer = build(model, sizes)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    torch.manual_seed(2)
    resumed = Model(hidden=16)
    resumed_optimizer = build(resumed, others)
    state = dict(zip(("model", "optimizer"), get_state_dict(resumed, resumed_optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        resumed, resumed_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for step in range(2, 4):
        for m, o in ((model, optimizer), (resumed, resumed_optimizer)):
            loss_of(m, step).backward()
            o.step()
            o.zero_grad()
    expected = full_weights(model)
    for name, weight in full_weights(resumed).items():
        if sizes == others:
            assert torch.equal(weight, expected[name]), name
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        ({"replicate": 2, "shard": 1, "tp": 2}, {"replicate": 2, "shard": 1, "tp": 2}),
        ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}),
        ({"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}),
        pytest.param({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, marks=pytest.mark.combination),
        pytest.param(
            {"dp": 1, "tp": 4}, {"replicate": 2, "shard": 2, "tp": 1}, marks=pytest.mark.combination
        ),
    ],
    ids=str,
)
def test_resuming_on_the_same_and_on_another_mesh(ranks, sizes, others, tmp_path):
    ranks(4, save_and_resume, sizes, others, str(tmp_path))
