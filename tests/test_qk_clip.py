"""Queries and keys are scaled as in one process, wherever they live, and the training goes on from there."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dmuon
from dmuon import AttentionHeads
from reference import ReferenceMuon

THRESHOLD = 2.0
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}


class Layer(nn.Module):
    """Four heads of two: queries and keys by themselves; grouped; fused head by head; and left to AdamW."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": 8, "k": 8, "grouped_q": 8, "grouped_k": 4, "qkv": 24, "base_q": 8, "base_k": 8}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(8, size, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = [linear(x).square().mean() for linear in self.children()]
        return sum(mean.full_tensor() if isinstance(mean, DTensor) else mean for mean in means)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers)


def is_muons(name: str, param: nn.Parameter) -> bool:
    return "base" not in name


def maxima(layer: int, kind: int, step: int, rank: int) -> torch.Tensor:
    """[4]: some heads over the threshold, on some ranks only."""
    return (
        torch.rand(4, generator=torch.Generator().manual_seed(1000 * layer + 100 * kind + 10 * step + rank))
        * 4
    )


def heads(step: int, rank: int, part: slice) -> list[AttentionHeads]:
    found = []
    for i in (0, 1):
        at = f"layers.{i}"
        logits = [maxima(i, kind, step, rank) for kind in range(4)]
        sizes = {"heads": 4, "size": 2}
        found += [
            AttentionHeads.of(logits[0][part], f"{at}.q.weight", f"{at}.k.weight", **sizes),
            AttentionHeads.of(
                logits[1][part], f"{at}.grouped_q.weight", f"{at}.grouped_k.weight", key_heads=2, **sizes
            ),
            AttentionHeads.of(
                logits[2], f"{at}.qkv.weight", f"{at}.qkv.weight", key_start=2, stride=6, **sizes
            ),
            AttentionHeads.of(logits[3], f"{at}.base_q.weight", f"{at}.base_k.weight", **sizes),
        ]
    return found


@torch.no_grad()
def clip_by_hand(oracle: Model, step: int, ranks: int) -> None:
    for i, layer in enumerate(oracle.layers):
        for kind in range(4):
            largest = torch.stack([maxima(i, kind, step, r) for r in range(ranks)]).amax(0)
            for h, gamma in enumerate((THRESHOLD / largest).clamp(max=1).tolist()):
                rows = slice(2 * h, 2 * h + 2)
                if kind in (0, 3):
                    for linear in (layer.q, layer.k) if kind == 0 else (layer.base_q, layer.base_k):
                        linear.weight[rows] *= gamma**0.5
                elif kind == 1:
                    layer.grouped_q.weight[rows] *= gamma
                else:
                    layer.qkv.weight[6 * h : 6 * h + 4] *= gamma**0.5


def train(sizes: dict[str, int], **options) -> None:
    torch.manual_seed(0)
    model = Model()
    oracle = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        for layer in model.layers:
            plan = dict.fromkeys(
                ("q", "k", "grouped_q", "grouped_k"), ColwiseParallel(use_local_output=False)
            )
            parallelize_module(layer, mesh["tp"], plan)
    if "ddp" in sizes:
        dmuon.dedicate_params_ddp(model, mesh["ddp"], predicate=is_muons)
        dmuon.replicate(model, mesh["ddp"])
    else:
        replicas = {"replicate_mesh": mesh["replicate"]} if "replicate" in sizes else {}
        dmuon.dedicate_params(model, mesh["shard" if replicas else "dp"], predicate=is_muons, **replicas)
        around = mesh if replicas else mesh["dp"]
        for layer in model.layers:
            fully_shard(layer, mesh=around)
        fully_shard(model, mesh=around)
    optimizer = dmuon.Muon(model, **SETTINGS, **options)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS)
    tp = sizes.get("tp", 1)
    ranks, rank, place = dist.get_world_size() // tp, dist.get_rank() // tp, dist.get_rank() % tp
    for step in range(3):
        inputs = [
            torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(ranks)
        ]
        model(inputs[rank]).backward()
        for x in inputs:
            (oracle(x) / ranks).backward()
        optimizer.step()
        reference.step()
        part = slice(4 // tp * place, 4 // tp * (place + 1))
        found = dmuon.qk_clip_(model, heads(step, rank, part), THRESHOLD)
        clip_by_hand(oracle, step, ranks)
        largest = torch.stack([maxima(0, 0, step, r) for r in range(ranks)]).amax(0)
        torch.testing.assert_close(found[0], largest)
        optimizer.zero_grad()
        reference.zero_grad()
        for name, weight in oracle.named_parameters():
            whole = dmuon.full_tensor(model.get_parameter(name)).detach()
            assert (whole - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 4}, {"replicate": 2, "shard": 2}, {"dp": 2, "tp": 2}, {"ddp": 2}],
    ids=["dp4", "hsdp2x2", "dp2-tp2", "ddp2"],
)
def test_training_with_qk_clip_equals_one_process(ranks, sizes):
    ranks(torch.Size(sizes.values()).numel(), train, sizes)


def refuse() -> None:
    model = Model()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, predicate=is_muons)
    fully_shard(model, mesh=mesh)
    dmuon.Muon(model)
    name, sizes = "layers.0.q.weight", {"heads": 4, "size": 2}
    for layer, threshold, message in (
        (AttentionHeads.of(torch.zeros(4), name, name, **sizes), 0.0, "threshold must be > 0"),
        (AttentionHeads.of(torch.zeros(4), "q", name, **sizes), 1.0, "has no parameter 'q'"),
        (AttentionHeads.of(torch.zeros(3), name, name, **sizes), 1.0, r"shape \(3,\), not \(4,\)"),
        (AttentionHeads.of(torch.zeros(2), name, name, **sizes), 1.0, "does not cut it into 2 pieces"),
        (AttentionHeads.of(torch.zeros(4), name, name, key_start=1, **sizes), 1.0, "has 8 rows"),
        (AttentionHeads(torch.zeros(4), name, name), 1.0, "no rows of layers.0.q.weight"),
    ):
        with pytest.raises(ValueError, match=message):
            dmuon.qk_clip_(model, [layer], threshold)


def test_what_does_not_fit_is_refused_by_name(ranks):
    ranks(1, refuse)
