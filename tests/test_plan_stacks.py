"""The planner's stacks of experts against the engine: owners, loads, and what each rank keeps."""

import math

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.engine.parameter import local_part
from dmuon.engine.runtime import find_runtime
from dmuon.planner import Dtypes, Mesh, Options, Plan, from_module, load, plan_model
from dmuon.planner.traffic import PHASES
from test_stacks import Mixture, distribute, is_muons, loss_of

COUNT = 5  # experts: unevenly cut
MESHES = {
    "dp=4": {"dp": 4},
    "replicate=2,shard=2": {"replicate": 2, "shard": 2},
    "dp=4,ep=2": {"efsdp": 2, "ep": 2},
}


def run_all() -> list[dict]:
    """On each mesh: the owners, this rank's bytes of weights and momenta, and what moved in a step."""
    answers = []
    for sizes in MESHES.values():
        model = Mixture(COUNT)
        optimizer = distribute(model, sizes)
        for step in range(2):
            find_runtime(model).traffic.reset()
            optimizer.zero_grad()
            loss_of(model, 100 * step + dist.get_rank(), COUNT).backward()
            optimizer.step()
            optimizer.synchronize()
        records = dmuon.get_dedicated_params(model)
        traffic = find_runtime(model).traffic
        momenta = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
        answers.append(
            {
                "owners": {r.param_name: r.layout.slot_of(r.coordinate) for r in records},
                "weights": sum(local_part(p).nbytes for p in model.parameters()),
                "momentum": sum(local_part(m).nbytes for m in momenta),
                "moved": {phase: (n, traffic.bytes[phase]) for phase, n in traffic.collectives.items()},
            }
        )
    return answers


def planned(mesh: str) -> Plan:
    with torch.device("meta"):
        model = from_module(Mixture(COUNT), predicate=is_muons)
    return plan_model(model, Mesh.parse(mesh), Options(dtypes=Dtypes()))


def test_stacks_are_where_the_engine_has_them(ranks):
    answers = ranks(4, run_all)
    for index, mesh in enumerate(MESHES):
        plan = planned(mesh)
        assert plan.stacks
        for rank, by_mesh in enumerate(answers):
            seen, rest = by_mesh[index], plan.rest_of(rank)
            assert seen["owners"] == {m.param.name: m.slot for m in plan.matrices}, mesh
            assert seen["weights"] == rest.weights + rest.base_weights, (mesh, rank)
            assert seen["momentum"] == rest.momentum, (mesh, rank)
            assert seen["moved"] == plan.moves_of(rank), (mesh, rank)
            table = plan.moves.flatten(0, 1)[rank, PHASES.index("publish")].tolist()
            assert tuple(table) == plan.moves_of(rank).get("publish", (0, 0))


def test_experts_of_a_registry_are_stacks_where_the_mesh_says_so():
    separate = plan_model(load("mixtral-8x7b"), Mesh.parse("dp=16"))
    stacked = plan_model(load("mixtral-8x7b"), Mesh.parse("dp=16,ep=4"))
    assert (len(separate.stacks), len(stacked.stacks)) == (0, 3 * 32)
    assert {param.shape[0] for param in stacked.stacks} == {8}
    assert stacked.model.numel == separate.model.numel
    assert stacked.rest[..., 3].sum() + stacked.rest[..., 0].sum() == 4 * stacked.model.numel


@pytest.mark.parametrize("mesh", ["dp=2048,ep=64", "replicate=4,shard=512,ep=64"])
@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
def test_dense_matrices_are_balanced_around_experts(model, mesh):
    plan = plan_model(load(model), Mesh.parse(mesh))
    assert plan.balance < 1.02
    held = [plan.mesh.held(256, shard) for shard in range(plan.mesh.shard)]
    assert sum(held) == 256
    assert math.isclose(sum(plan.busy), sum(m.cost for m in plan.weighed) + sum(plan.stack_loads))
