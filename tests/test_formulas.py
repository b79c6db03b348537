"""The planner's formulas, those of docs/bytes-and-memory.md, against what was really moved and kept."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import dmuon
import layouts
from dmuon.engine.parameter import local_part
from dmuon.planner import Dtypes, Mesh, Options, Plan, from_module, plan_model
from dmuon.planner.cut import Rule
from dmuon.planner.memory import Rest
from dmuon.planner.traffic import PHASES, Moves, in_sum
from dmuon.engine.runtime import find_runtime
from layouts import Model, is_proj, make_mesh
from test_tensor_parallel import DDP_MESHES, MESHES

EVEN, UNEVEN = (8, 16), (6, 13)  # width and hidden width: in pieces that divide, without padding, and not
TP_PLAN = {  # of layouts.PLAN
    "up_proj": Rule("rows", cuts_bias=True),
    "gate_proj": Rule("rows", cuts_bias=True),
    "down_proj": Rule("columns"),
}
MESHES_WITHOUT_TP = [
    pytest.param({"dp": 4}, id="dp4"),
    pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
]


def replicate_mix(model: Model, mesh: DeviceMesh) -> None:
    """A matrix that tensor parallelism replicates, as a DTensor."""

    def enter(module: Any, inputs: Any, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    def leave(module: Any, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    for layer in model.layers:
        distribute_module(layer.mix_proj, mesh, input_fn=enter, output_fn=leave)


def run(sizes: dict[str, int], shape: tuple[int, int], variant: dict[str, Any]) -> dict[str, Any]:
    """What a rank moved up to its first step, and in its second; what it keeps; the owners by name."""
    width, hidden = shape
    model = Model(width=width, hidden=hidden)
    policy = None
    if variant.get("mixed"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float64)
    if variant.get("copies"):
        replicate_mix(model, make_mesh(sizes)["tp"])
    layouts.distribute(model, sizes, mp_policy=policy, reshard=variant.get("reshard", True))
    gram = {"tp_distributed_gram": True, "tp_distributed_gram_policy": variant.get("gram")}
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32, **(gram if "gram" in variant else {}))
    traffic = find_runtime(model).traffic
    moved = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=policy is not None):
            model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        moved.append({phase: (n, traffic.bytes[phase]) for phase, n in traffic.collectives.items()})
        traffic.reset()
    records = dmuon.get_dedicated_params(model)
    owners = {r.param_name: (r.layout.slot_of(r.coordinate), r.tp_owner) for r in records}
    return {"first": moved[0], "second": moved[1], "kept": kept(model, optimizer), "owners": owners}


def kept(model: Model, optimizer: dmuon.Muon) -> Rest:
    """Bytes that this rank keeps, after a step and before `zero_grad`."""
    records = dmuon.get_dedicated_params(model)
    gathered = storages(record.gathered for record in records)
    resting = {id(record.resting) for record in records}
    base = [param for param in model.parameters() if id(param) not in resting]
    moments = [optimizer.state[param][name] for param in base for name in ("exp_avg", "exp_avg_sq")]
    return Rest(
        weights=nbytes(r.resting for r in records if not gathered.keys() & storages([r.resting]).keys()),
        momentum=nbytes(optimizer.state[r.resting]["momentum_buffer"] for r in records),
        gradients=nbytes(r.resting.grad for r in records),
        gathered=sum(gathered.values()),
        base_weights=nbytes(base),
        base_moments=nbytes(moments),
        base_gradients=nbytes(param.grad for param in base),
    )


def nbytes(tensors: Any) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


def storages(tensors: Any) -> dict[int, int]:
    found = [local_part(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def planned(sizes: dict[str, int], shape: tuple[int, int], variant: dict[str, Any]) -> Plan:
    with torch.device("meta"):
        model = from_module(Model(*shape), predicate=is_proj)
    options = Options(
        dtypes=Dtypes(compute=2, reduce=8) if variant.get("mixed") else Dtypes(),
        reshard=variant.get("reshard", True),
        gram_policy=variant.get("gram", "never"),
        tp_plan={**TP_PLAN, "mix_proj": Rule("replicate")} if variant.get("copies") else TP_PLAN,
    )
    return plan_model(model, Mesh.parse(",".join(f"{name}={size}" for name, size in sizes.items())), options)


def variants_of(sizes: dict[str, int], shape: tuple[int, int]) -> list[dict[str, Any]]:
    if shape == EVEN:
        return [{}]
    return [
        {},
        {"mixed": True},
        *([{"reshard": False}] if "ddp" not in sizes else []),
        *([{"gram": "always"}, {"gram": "beneficial"}, {"copies": True}] if sizes.get("tp", 1) > 1 else []),
    ]


def run_all(sizes: dict[str, int], shape: tuple[int, int]) -> list[dict[str, Any]]:
    return [run(sizes, shape, variant) for variant in variants_of(sizes, shape)]


@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes", MESHES + MESHES_WITHOUT_TP + DDP_MESHES)
def test_collectives_bytes_and_memory_are_those_of_the_formulas(ranks, sizes, shape):
    answers = ranks(math.prod(sizes.values()), run_all, sizes, shape)
    for index, variant in enumerate(variants_of(sizes, shape)):
        plan = planned(sizes, shape, variant)
        owners = {m.param.name: (m.slot, m.share.tp_owner) for m in plan.matrices}
        for rank, by_variant in enumerate(answers):
            seen = by_variant[index]
            assert seen["owners"] == owners, variant
            assert seen["second"] == plan.moves_of(rank), (variant, rank)
            assert seen["first"] == in_sum(plan.moves_of(rank), plan.start_of(rank)), (variant, rank)
            assert seen["kept"] == plan.rest_of(rank), (variant, rank)
            assert by_phase(plan.moves.flatten(0, 1)[rank]) == plan.moves_of(rank)
            assert Rest(*plan.rest.flatten(0, 1)[rank].tolist()) == plan.rest_of(rank)


def by_phase(table: torch.Tensor) -> Moves:
    return {
        phase: (calls, size) for phase, (calls, size) in zip(PHASES, table.tolist(), strict=True) if calls
    }
