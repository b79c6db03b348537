"""A mesh of 1,024 ranks, seen from one, on torch's fake process group: against its plan, and warnings."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

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


def in_a_world_of_its_own(code: str) -> Any:
    """What a process prints last, in JSON."""
    tests = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.always("hsdp")
@pytest.mark.parametrize("sizes", [HSDP, DDP], ids=["hsdp", "ddp"])
def test_one_rank_of_many_does_as_planned(sizes):
    plan = planned(sizes)
    slot, tp_owner = plan.matrices[0].slot, plan.matrices[0].share.tp_owner
    rank = plan.mesh.tp * slot + tp_owner  # an owner; the small meshes have all kinds of ranks
    code = f"import json, test_large_mesh as t; print(json.dumps(t.run({sizes!r}, {rank})))"
    seen = in_a_world_of_its_own(code)
    assert seen["owners"] == [[m.slot, m.share.tp_owner] for m in plan.matrices]
    assert seen["moved"] == {phase: list(numbers) for phase, numbers in plan.moves_of(rank).items()}
    assert seen["kept"] == list(plan.rest_of(rank))


# Teams, in rows of several ranks with replicas


def order_of_publishes(rank: int) -> list[str]:
    """The groups that a step publishes, in their order."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    model = layouts.Model(depth=6)
    teams = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}
    optimizer = layouts.build(model, {"replicate": 2, "shard": 2, "tp": 2}, **teams)
    layouts.loss_of(model, 0).backward()
    seen: list[str] = []
    find_runtime(model).communication.weights.on_put = lambda phase, group: seen.append(f"{phase} {group}")
    optimizer.step()
    optimizer.synchronize()
    dist.destroy_process_group()
    return seen


def test_who_has_no_team_publishes_in_the_order_of_those_who_have():
    code = "import json, test_large_mesh as t; print(json.dumps(t.order_of_publishes({})))"
    first, below = (in_a_world_of_its_own(code.format(rank)) for rank in (0, 4))  # of one column
    assert len(first) == 6
    assert first == below


# Warnings of long rows


def warnings_of(sizes: dict[str, int], reduce_dtype: torch.dtype) -> list[str]:
    """What is logged when the optimizer is built."""
    model, mesh = layouts.Model(depth=1), layouts.make_mesh(sizes)
    layouts.dedicate(model, mesh)
    layouts.shard(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("dmuon").addHandler(handler)
    dmuon.Muon(model)
    logging.getLogger("dmuon").removeHandler(handler)
    return logged


def all_warnings() -> list[list[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    return [
        warnings_of({"dp": 1024}, torch.bfloat16),
        warnings_of({"dp": 1024}, torch.float32),
        warnings_of({"replicate": 8, "shard": 128}, torch.bfloat16),
        warnings_of({"replicate": 128, "shard": 8}, torch.bfloat16),
        warnings_of({"replicate": 8, "shard": 128}, torch.float32),
        warnings_of({"replicate": 16, "shard": 64}, torch.bfloat16),
    ]


def test_long_rows_are_warned_of():
    code = "import json, test_large_mesh as t; print(json.dumps(t.all_warnings()))"
    both, row, shards, replicas, exact, short = in_a_world_of_its_own(code)
    rounds = "gradients are reduced in torch.bfloat16 over {} ranks in a chain, each of which rounds"
    long = "a row has 1024 ranks.*Use HSDP with rows of at most 128"
    assert len(both) == 2
    assert re.match(rounds.format(1024), both[0])
    assert "reduce_dtype=torch.float32" in both[0]
    assert re.match(long, both[1])
    assert len(row) == 1
    assert re.match(long, row[0])
    for warned in (shards, replicas):
        assert len(warned) == 1
        assert re.match(rounds.format(128), warned[0])
    assert exact == short == []
