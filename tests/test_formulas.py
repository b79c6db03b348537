"""The planner's numbers, those of docs/bytes-and-memory.md, against what was really moved and kept."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import dmuon
import layouts
from dmuon.engine.buffer import Updates
from dmuon.engine.parameter import local_part
from dmuon.engine.runtime import Runtime, find_runtime
from dmuon.planner import Dtypes, Mesh, Options, Plan, from_module, plan_model
from dmuon.planner.cut import Rule
from dmuon.planner.memory import Rest
from dmuon.planner.traffic import PHASES, Moves, in_sum
from layouts import Model, is_proj, make_mesh
from test_tensor_parallel import DDP_MESHES, MESHES

pytestmark = pytest.mark.always(
    "dp2-tp2", "dp4-uneven", "hsdp2x2-uneven", "ddp4-uneven", "ddp2-tp2-uneven", "hsdp2x1-tp2-uneven"
)

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
    team = {"tp_distributed_gram": True, "tp_distributed_gram_policy": variant.get("team")}
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32, **(team if "team" in variant else {}))
    runtime = find_runtime(model)
    moved = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=policy is not None):
            model(torch.randn(4, width)).square().mean().backward()
        updates = updates_of_a_step(optimizer, runtime)
        optimizer.synchronize()
        traffic = runtime.traffic
        moved.append({phase: (n, traffic.bytes[phase]) for phase, n in traffic.collectives.items()})
        traffic.reset()
    owners = {r.param_name: (r.layout.slot_of(r.coordinate), r.tp_owner) for r in runtime.params}
    return {
        "first": moved[0],
        "second": moved[1],
        "sentence": collectives(runtime, reshard=variant.get("reshard", True)),
        "kept": kept(model, optimizer),
        "updates": updates,
        "owners": owners,
    }


def collectives(runtime: Runtime, *, reshard: bool) -> dict[str, int]:
    """Per group: gather 1 or 2, reduce 1; along the column 1 + 1; in the owner row 1 + 1 where pieces are no
    parts of a team, and 1 for those of which the row has copies. Of a team, for the norms and in each step of
    Newton-Schulz, reduce 1 and gather 2."""
    calls: Counter[str] = Counter()
    for group in runtime.groups:
        mine = [param for param in group.params if param.in_owner_row]
        if runtime.layout.shard_size > 1:
            calls += Counter({"gather": 2 if reshard else 1, "reduce": 1})
        if runtime.layout.replicate_size > 1 and any(param.keeps_weight for param in group.params):
            calls += Counter(reduce_replicas=1, publish=1)
        if any(param.is_exchanged for param in mine):
            calls += Counter(exchange=1, publish_exchange=1)
        if any(param.has_team for param in mine):
            calls += Counter(team_reduce=5, team_gather=11)
        if any(param.tp is not None and len(param.tp.copies) > 1 for param in mine):
            calls += Counter(sum_copies=1)
    return dict(calls)


def updates_of_a_step(optimizer: dmuon.Muon, runtime: Runtime) -> int:
    """Make a step; the bytes of updates that it leaves to be published."""
    seen = []

    def publish(updates: Updates) -> None:
        tensors = [t for update in updates.values() for t in (update.orthogonal, update.part)]
        seen.append(sum(storages(t for t in tensors if t is not None).values()))
        type(runtime).publish(runtime, updates)

    runtime.publish = publish
    optimizer.step()
    del runtime.publish
    return seen[0]


def kept(model: Model, optimizer: dmuon.Muon) -> Rest:
    """Bytes that this rank keeps, after a step and before `zero_grad`."""
    records = dmuon.get_dedicated_params(model)
    resting = {id(record.resting) for record in records}
    same = storages(record.resting for record in records).keys()
    gathered = [r.gathered for r in records if not storages([r.gathered]).keys() & same]
    base = [param for param in model.parameters() if id(param) not in resting]
    moments = [optimizer.state[param][name] for param in base for name in ("exp_avg", "exp_avg_sq")]
    return Rest(
        weights=nbytes(r.resting for r in records) + sum(storages(gathered).values()),
        momentum=nbytes(optimizer.state[r.resting]["momentum_buffer"] for r in records),
        gradients=nbytes(r.resting.grad for r in records),
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
        dtypes=Dtypes(compute=torch.bfloat16, reduce=torch.float64) if variant.get("mixed") else Dtypes(),
        reshard=variant.get("reshard", True),
        teams=variant.get("team", "never"),
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
        *([{"team": "always"}, {"copies": True}] if sizes.get("tp", 1) > 1 else []),
    ]


def run_all(sizes: dict[str, int], shape: tuple[int, int]) -> list[dict[str, Any]]:
    return [run(sizes, shape, variant) for variant in variants_of(sizes, shape)]


@pytest.mark.always("hsdp2x1-tp2-uneven", "dp4-uneven", "hsdp2x2-uneven", "ddp4-uneven", "dp2-tp2-even")
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
            assert {phase: calls for phase, (calls, _) in seen["second"].items()} == seen["sentence"], variant
            assert seen["second"] == plan.moves_of(rank), (variant, rank)
            assert seen["first"] == in_sum(plan.moves_of(rank), plan.start_of(rank)), (variant, rank)
            assert seen["kept"] == plan.rest_of(rank), (variant, rank)
            assert seen["updates"] == plan.updates.flatten()[rank], (variant, rank)
            assert by_phase(plan.moves.flatten(0, 1)[rank]) == plan.moves_of(rank)
            assert Rest(*plan.rest.flatten(0, 1)[rank].tolist()) == plan.rest_of(rank)


def by_phase(table: torch.Tensor) -> Moves:
    return {
        phase: (calls, size) for phase, (calls, size) in zip(PHASES, table.tolist(), strict=True) if calls
    }


# Compared with FSDP2


def between_rows(*, dedicated: bool) -> tuple[int, Mapping[str, int], list[list[tuple[int, int]]]]:
    """What this rank moves between the rows of HSDP in a step, all in bfloat16: FSDP2's bytes, dmuon's by
    phase; and the owners of each group."""
    mesh, model = make_mesh({"replicate": 2, "shard": 2}), Model(*EVEN)
    if dedicated:
        layouts.dedicate(model, mesh)
    layouts.shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    optimizer = dmuon.Muon(model, ns_dtype=torch.bfloat16) if dedicated else None
    x = torch.randn(4, EVEN[0])
    with torch.no_grad():
        model(x)  # initial weights are sent
    if dedicated:
        find_runtime(model).traffic.reset()
    sizes: list[int] = []
    all_reduce, column = dist.all_reduce, mesh.get_group("replicate")

    def spy(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is column:
            sizes.append(tensor.nbytes)  # each rank's share of 2 (R - 1) times this
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = spy
    try:
        model(x).float().square().mean().backward()
    finally:
        dist.all_reduce = all_reduce
    if optimizer is None:
        return sum(sizes), {}, []
    optimizer.step()
    optimizer.synchronize()
    runtime = find_runtime(model)
    owners = [[(p.coordinate.shard, p.coordinate.replicate) for p in g.params] for g in runtime.groups]
    return sum(sizes), runtime.traffic.bytes, owners


def test_between_rows_hsdp_moves_what_fsdp2_does(ranks):
    plain = sum(nbytes for nbytes, *_ in ranks(4, between_rows, dedicated=False))
    answers = ranks(4, between_rows, dedicated=True)
    moved = {
        phase: sum(by_phase[phase] for _, by_phase, _ in answers) for phase in ("reduce_replicas", "publish")
    }
    # A count for each matrix each way: 2 bytes, those of one owner padded to 16.
    counts = sum(-(-2 * n // 16) * 16 for owners in answers[0][2] for n in Counter(owners).values())
    base = sum(nbytes for nbytes, *_ in answers)
    assert 0 < base < plain
    assert moved["reduce_replicas"] == moved["publish"]
    assert base + sum(moved.values()) == plain + 2 * counts
