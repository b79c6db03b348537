"""dmuon: `dedicate_params` before `fully_shard`, and `dmuon.Muon` for everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.optim.newton_schulz import Settings, orthogonalize, resolve_coefficients
from dmuon.optim.products import matrices_at_once
from dmuon.scratch import Scratch
from parallel import spread_for_dmuon
from settings import (
    ADAMW_BETAS,
    ADAMW_EPS,
    ADAMW_LR,
    LR,
    MOMENTUM,
    NESTEROV,
    NS_STEPS,
    WEIGHT_DECAY,
)

NAME = "dmuon"
UPDATE = "muon"
NOTE = (
    "dedicate_params, then fully_shard; dmuon.Muon for all parameters: Newton-Schulz in float32, its default "
    "on CPU, and AdamW(fused=True), its default too."
)


def build(
    model: nn.Module, mesh: DeviceMesh, ns_dtype: torch.dtype | None = None
) -> tuple[nn.Module, dmuon.Muon]:
    spread = spread_for_dmuon(model, mesh, bfloat16=False)
    optimizer = dmuon.Muon(
        spread,
        lr=LR,
        momentum=MOMENTUM,
        nesterov=NESTEROV,
        ns_steps=NS_STEPS,
        ns_dtype=ns_dtype,
        weight_decay=WEIGHT_DECAY,
        adamw_lr=ADAMW_LR,
        adamw_betas=ADAMW_BETAS,
        adamw_eps=ADAMW_EPS,
        adamw_weight_decay=WEIGHT_DECAY,
    )
    return spread, optimizer


def finish(optimizer: dmuon.Muon) -> None:
    optimizer.synchronize()


def newton_schulz(model: nn.Module, ns_dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """As the step does it: matrices of one shape in batches, in buffers that are used again."""
    settings = Settings(resolve_coefficients("quintic", NS_STEPS), ns_dtype)
    rank = dist.get_rank()
    counts = Counter(tuple(p.full_shape) for p in dmuon.get_dedicated_params(model) if p.owner_rank == rank)
    for stack in find_runtime(model).stacks:
        assert isinstance(stack.param, DTensor)
        here = stack.param.to_local()
        counts[tuple(here.shape[1:])] += len(here)
    batches: list[torch.Tensor] = []
    for (rows, cols), count in counts.items():
        at_once = matrices_at_once(rows, cols, ns_dtype, torch.device("cpu"))
        batches += torch.randn(count, rows, cols).split(at_once)

    def loop() -> None:
        scratch = Scratch(reuse=True)
        for batch in batches:
            scratch.give_back(orthogonalize(batch, settings, scratch))

    return loop
