"""torch's pipelining over stages with dedicated parameters equals the single-process oracle."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import parallelize_module

import dmuon
from layouts import PLAN, Layer, dedicate
from models import is_proj
from ranks import RanksFailed
from reference import ReferenceMuon

STAGES, MICRO_BATCHES, WIDTH, HIDDEN = 2, 4, 6, 12

MESHES = [
    pytest.param({"pp": 2, "dp": 2}, id="fsdp2"),
    pytest.param({"pp": 2, "replicate": 2, "shard": 1}, id="hsdp"),
    pytest.param({"pp": 2, "dp": 1, "tp": 2}, id="fsdp2-tp"),
]


class Stage(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stages_of(count: int) -> list[Stage]:
    torch.manual_seed(1)
    return [Stage([Layer(WIDTH, HIDDEN) for _ in range(2)]) for _ in range(count)]


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names
    if "tp" in names:
        for layer in stage.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    dedicate(stage, mesh)
    dp = mesh["replicate", "shard"] if "replicate" in names else mesh["dp"]
    for layer in stage.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(stage, mesh=dp)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def data(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return tuple(torch.randn(2 * MICRO_BATCHES, WIDTH, generator=generator) for _ in range(2))


def train(sizes: dict[str, int], schedule_name: str, clip: float | None) -> tuple[float, list[float]]:
    """Three steps equal to the oracle's: weights, momenta and norms."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    kind = getattr(schedules, schedule_name)
    looped = issubclass(kind, schedules.PipelineScheduleMulti)
    count = 2 * STAGES if looped else STAGES
    oracle = nn.Sequential(*stages_of(count))
    mine = copy.deepcopy(oracle)
    reference = ReferenceMuon(oracle, is_proj, lr=0.05)
    pp = mesh["pp"].get_local_rank()
    inner = mesh[tuple(name for name in mesh.mesh_dim_names if name != "pp")]
    parts = {number: mine[number] for number in range(pp, count, STAGES)}
    for part in parts.values():
        shard(part, mesh)
    optimizers = [dmuon.Muon(part, lr=0.05) for part in parts.values()]
    group = mesh["pp"].get_group()
    pipeline = [
        PipelineStage(part, number, count, torch.device("cpu"), group=group) for number, part in parts.items()
    ]
    schedule = kind(pipeline if looped else pipeline[0], MICRO_BATCHES, loss_fn=loss_of)
    tp = sizes.get("tp", 1)
    data_ranks = inner.size() // tp
    data_rank = (dist.get_rank() % inner.size()) // tp
    norms = []
    for step in range(3):
        x, y = data(step, data_rank)
        is_first, is_last = 0 in parts, count - 1 in parts
        schedule.step(*([x] if is_first else []), **({"target": y, "losses": []} if is_last else {}))
        for rank in range(data_ranks):
            for micro in zip(*(t.chunk(MICRO_BATCHES) for t in data(step, rank)), strict=True):
                (loss_of(oracle(micro[0]), micro[1]) / MICRO_BATCHES / data_ranks).backward()
        if clip is not None:
            norm = dmuon.clip_grad_norm_(list(parts.values()), clip, pipeline=mesh["pp"])
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), clip)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            norms.append(norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    worst = 0.0
    for number, part in parts.items():
        weights = {name: dmuon.full_tensor(p).detach() for name, p in part.named_parameters()}
        for name, expected in oracle[number].named_parameters():
            worst = max(worst, (weights[name] - expected).abs().max().item())
    for optimizer, (number, part) in zip(optimizers, parts.items(), strict=True):
        named = dict(oracle[number].named_parameters())
        for record in dmuon.get_dedicated_params(part):
            if record.keeps_state:
                momentum = optimizer.state[record.resting]["momentum_buffer"]._local_tensor
                expected = reference.buffers[named[record.param_name]]
                worst = max(worst, (momentum - expected).abs().max().item())
    return worst, norms


@pytest.mark.always(
    "fsdp2-ScheduleGPipe",
    "hsdp-Schedule1F1B",
    "tp-ScheduleInterleaved1F1B",
    "fsdp2-ScheduleInterleaved1F1B",
)
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("sizes", MESHES)
def test_a_pipeline_equals_the_oracle(ranks, sizes, schedule):
    answers = ranks(4, train, sizes, schedule, 0.5)
    assert max(worst for worst, _ in answers) <= 1e-5
    assert len({tuple(norms) for _, norms in answers}) == 1  # one norm, on all stages


def test_zero_bubble_schedules_are_refused_by_name(ranks):
    with pytest.raises(
        RanksFailed, match=r"layers\.0\.\w+_proj\.weight.*ScheduleInterleavedZeroBubble"
    ) as error:
        ranks(4, train, {"pp": 2, "dp": 2}, "ScheduleInterleavedZeroBubble", None)
    assert len(error.value.failed) == 4
