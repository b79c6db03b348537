"""What torch offers by itself: `fully_shard`, and `torch.optim.Muon` on the sharded matrices.

Muon's step sees DTensors. It is ordinary tensor code, so that torch's own sharding rules put every product of
Newton-Schulz together across ranks, and issue the collectives that this takes. The result is Muon's update of
the whole matrix, on any mesh; each rank does its part of some products and all of the others.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel import spread_for_adamw
from settings import LR, MOMENTUM, NESTEROV, NS_STEPS, WEIGHT_DECAY, Together, adamw, matrices_and_others

NAME = "FSDP2 + torch Muon"
UPDATE = "muon"
DTYPE = torch.bfloat16
NOTE = (
    "fully_shard; torch.optim.Muon on the sharded matrices as they are (DTensors: torch issues the "
    "collectives inside Newton-Schulz, which is in bfloat16), AdamW(fused=True) on the rest."
)


def build(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Together]:
    spread = spread_for_adamw(model, mesh, bfloat16=False)
    matrices, others = matrices_and_others(spread)
    muon = torch.optim.Muon(
        matrices, lr=LR, momentum=MOMENTUM, nesterov=NESTEROV, ns_steps=NS_STEPS, weight_decay=WEIGHT_DECAY
    )
    return spread, Together(muon, adamw(others))
