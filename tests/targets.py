"""Training on gradients that are given, on every layout, and what should come of it."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import dmuon
import layouts
from dmuon.engine.parameter import DedicatedParam
from layouts import Sizes
from models import InnerProduct, InnerProducts, everything
from reference import ReferenceMuon

Targets = list[list[list[torch.Tensor | None]]]  # by step, rank and weight


def kept_by_one(tensor: torch.Tensor, record: DedicatedParam) -> torch.Tensor:
    """The whole value, on every rank, of a momentum or a gradient: exactly one rank keeps each element.

    Where tensor parallelism leaves a matrix alone, one rank of each tensor-parallel column does.
    """
    local = tensor.to_local()
    whole, keepers = torch.zeros(tensor.shape, dtype=local.dtype), torch.zeros(tensor.shape)
    if local.numel():
        where = record.part if record.has_team else ...
        assert whole[where].shape == local.shape
        whole[where] = local
        keepers[where] = 1
    dist.all_reduce(whole)
    dist.all_reduce(keepers)
    expected = 1 if record.is_cut else dist.get_world_size() // record.layout.size
    assert (keepers == expected).all(), f"{record} is kept by several ranks, or by none"
    return whole / expected


def momentum_of(optimizer: dmuon.Muon, record: DedicatedParam) -> torch.Tensor:
    """The whole momentum of a dedicated parameter, on every rank."""
    return kept_by_one(optimizer.state[record.resting]["momentum_buffer"], record)


def distribute(
    model: nn.Module, sizes: Sizes, *, reshard: bool = True, one_group: bool = False, **kwargs: Any
) -> None:
    """`one_group` lets all weights share one hook boundary; otherwise each has its own."""
    kwargs.setdefault("predicate", everything)
    if "ddp" in sizes:
        layouts.distribute(model, sizes, hook_boundary=None if one_group else InnerProduct, **kwargs)
    elif one_group:
        mesh = layouts.dedicate_on(model, sizes, reshard=reshard, **kwargs)
        data = mesh["replicate", "shard"] if "replicate" in sizes else mesh["dp"]
        fully_shard(model, mesh=data, reshard_after_forward=reshard)
    else:
        layouts.distribute(model, sizes, reshard=reshard, **kwargs)


def train_on_targets(
    sizes: Sizes,
    weights: list[torch.Tensor],
    targets: Targets,
    *,
    reshard: bool = True,
    one_group: bool = False,
    **muon: object,
) -> list[list[dict[str, torch.Tensor | None]]]:
    """What each step left, by step and weight: the whole "weight", "momentum" and "gradient" (None: none)."""
    model = InnerProducts(weights)
    distribute(model, sizes, reshard=reshard, one_group=one_group)
    optimizer = dmuon.Muon(model, **muon)
    mine, _ = layouts.data_rank(sizes)
    return [train_step(model, optimizer, by_rank[mine]) for by_rank in targets]


def train_step(
    model: nn.Module, optimizer: dmuon.Muon, targets: list[torch.Tensor | None]
) -> list[dict[str, torch.Tensor | None]]:
    """One step on this rank's targets, and what it left."""
    records = dmuon.get_dedicated_params(model)
    model(targets).backward()
    gradients = [None if r.resting.grad is None else kept_by_one(r.resting.grad, r) for r in records]
    optimizer.step()
    optimizer.zero_grad()
    for record in records:  # the owner row, and under HSDP its replicas
        piece = record.piece()  # collective
        if record.keeps_weight:
            assert torch.equal(record.local, piece), f"{record} is another on a replica"
    return [
        {
            "weight": dmuon.full_tensor(record.resting).detach().clone(),
            "momentum": momentum_of(optimizer, record) if record.resting in optimizer.state else None,
            "gradient": gradient,
        }
        for record, gradient in zip(records, gradients, strict=True)
    ]


def random_targets(weights: list[torch.Tensor], steps: int, ranks: int) -> Targets:
    """Different on each rank, and large enough for a sum to be told from a mean."""
    generator = torch.Generator().manual_seed(7)
    return [
        [[3 * torch.randn(w.shape, generator=generator) for w in weights] for _ in range(ranks)]
        for _ in range(steps)
    ]


def same_on_all(targets: list[list[torch.Tensor]], ranks: int) -> Targets:
    """Each step's targets, on every rank."""
    return [[step] * ranks for step in targets]


def train_oracle(
    weights: list[torch.Tensor], targets: Targets, *, maximize: bool = False, **settings: Any
) -> list[list[dict[str, torch.Tensor]]]:
    """What `train_on_targets` should return, by a single process on the mean of the targets."""
    model = InnerProducts(weights)
    reference = ReferenceMuon(model, lambda name, param: True, **settings)
    params = list(model.parameters())
    history = []
    for by_rank in targets:
        means = [mean_target(list(of_one)) for of_one in zip(*by_rank, strict=True)]
        for param, mean in zip(params, means, strict=True):
            param.grad = -mean if maximize and mean is not None else mean
        reference.step()
        history.append(
            [
                {
                    "weight": param.detach().clone(),
                    "momentum": reference.buffers[param].clone() if param in reference.buffers else None,
                    "gradient": mean,
                }
                for param, mean in zip(params, means, strict=True)
            ]
        )
    return history


def mean_target(targets: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean over the ranks, to which one without a target adds zero; None if no rank has one."""
    like = next((target for target in targets if target is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if t is None else t for t in targets]).mean(0)


def assert_histories_close(found: list, expected: list, tolerance: float = 1e-5) -> None:
    """Equal in all that the oracle has."""
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for index, (ours, oracle) in enumerate(zip(mine, theirs, strict=True)):
            for what in ("gradient", "momentum", "weight"):
                if oracle[what] is None:
                    continue
                difference = (ours[what] - oracle[what]).abs().max().item()
                assert difference <= tolerance, f"{what} {index} is off by {difference} at step {step}"
