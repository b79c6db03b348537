"""The plan of a mesh of 1,024 ranks against one of its ranks, on torch's fake process group."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dmuon
import layouts
from dmuon.engine.runtime import find_runtime
from dmuon.planner import Dtypes, Mesh, Options, Plan, from_module, plan_model
from test_formulas import TP_PLAN, kept

HSDP = {"replicate": 16, "shard": 16, "tp": 4}
DDP = {"ddp": 256, "tp": 4}
DEPTH = 8


def planned(sizes: dict[str, int]) -> Plan:
    with torch.device("meta"):
        model = from_module(layouts.Model(depth=DEPTH), predicate=layouts.is_proj)
    mesh = Mesh.parse(",".join(f"{name}={size}" for name, size in sizes.items()))
    return plan_model(model, mesh, Options(dtypes=Dtypes(), tp_plan=TP_PLAN))


def run(sizes: dict[str, int], rank: int) -> dict:
    """What the rank counts and keeps. The others do not exist: what it receives is whatever was in memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
    model = layouts.Model(depth=DEPTH)
    optimizer = layouts.build(model, sizes)
    traffic = find_runtime(model).traffic
    for _ in range(2):
        traffic.reset()
        optimizer.zero_grad()
        layouts.loss_of(model, 0).backward()
        optimizer.step()
        optimizer.synchronize()
    owners = [[r.layout.slot_of(r.coordinate), r.tp_owner] for r in dmuon.get_dedicated_params(model)]
    moved = {phase: [count, traffic.bytes[phase]] for phase, count in traffic.collectives.items()}
    dist.destroy_process_group()
    return {"owners": owners, "moved": moved, "kept": list(kept(model, optimizer))}


@pytest.mark.always("hsdp")
@pytest.mark.parametrize("sizes", [HSDP, DDP], ids=["hsdp", "ddp"])
def test_one_rank_of_many_does_as_planned(sizes):
    plan = planned(sizes)
    slot, tp_owner = plan.matrices[0].slot, plan.matrices[0].share.tp_owner
    rank = plan.mesh.tp * slot + tp_owner  # an owner; the small meshes have all kinds of ranks
    code = f"import json, test_large_mesh as t; print(json.dumps(t.run({sizes!r}, {rank})))"
    tests = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["owners"] == [[m.slot, m.share.tp_owner] for m in plan.matrices]
    assert seen["moved"] == {phase: list(numbers) for phase, numbers in plan.moves_of(rank).items()}
    assert seen["kept"] == list(plan.rest_of(rank))
