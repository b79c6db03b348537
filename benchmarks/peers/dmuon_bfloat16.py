"""dmuon with Newton-Schulz in bfloat16, as torch's own Muon has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dmuon
from peers import dmuon_muon

NAME = "dmuon, bfloat16"
UPDATE = "muon"
DTYPE = torch.bfloat16
NOTE = "as dmuon, with ns_dtype=torch.bfloat16."
finish = dmuon_muon.finish


def build(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, dmuon.Muon]:
    return dmuon_muon.build(model, mesh, torch.bfloat16)


def newton_schulz(model: nn.Module) -> Callable[[], None]:
    return dmuon_muon.newton_schulz(model, torch.bfloat16)
