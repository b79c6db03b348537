"""The package muon-fsdp2: `fully_shard`, and each matrix gathered to one rank in `step()` and scattered back.

It compiles its Newton-Schulz with torch.compile, which needs a C++ compiler on CPU. It takes 1-D meshes only.
"""

from __future__ import annotations

import importlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallel import names_of, spread_for_adamw
from settings import (
    ADAMW_BETAS,
    ADAMW_EPS,
    ADAMW_LR,
    LR,
    MOMENTUM,
    NESTEROV,
    NS_STEPS,
    WEIGHT_DECAY,
    matrices_and_others,
)

NAME = "muon-fsdp2"
UPDATE = "muon"
DTYPE = torch.bfloat16
NOTE = (
    "fully_shard; the package's optimizer for all parameters. It gathers the momentum of each matrix to one "
    "rank, orthogonalizes there, compiled and in bfloat16, and scatters the update; AdamW is its own loop."
)


def supports(mesh: DeviceMesh) -> str | None:
    if names_of(mesh) != ("dp",):
        return "it takes 1-D meshes only: its classes for others raise NotImplementedError"
    return None


def build(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    package = importlib.import_module("muon_fsdp2")
    spread = spread_for_adamw(model, mesh, bfloat16=False)
    matrices, others = matrices_and_others(spread)
    muon = {
        "params": matrices,
        "use_muon": True,
        "lr": LR,
        "momentum": MOMENTUM,
        "nesterov": NESTEROV,
        "ns_steps": NS_STEPS,
        "weight_decay": WEIGHT_DECAY,
        "rms_scale": False,
    }
    adamw = {
        "params": others,
        "use_muon": False,
        "lr": ADAMW_LR,
        "betas": ADAMW_BETAS,
        "eps": ADAMW_EPS,
        "weight_decay": WEIGHT_DECAY,
    }
    return spread, package.Muon([muon, adamw])
