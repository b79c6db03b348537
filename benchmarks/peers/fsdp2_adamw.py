"""torch's own way, which the others are compared with: `fully_shard`, and AdamW for everything."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from parallel import spread_for_adamw
from settings import adamw, matrices_and_others

NAME = "FSDP2 + AdamW"
UPDATE = "adamw"
NOTE = "fully_shard; torch.optim.AdamW(fused=True) for all parameters."


def build(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, AdamW]:
    spread = spread_for_adamw(model, mesh, bfloat16=False)
    # Two groups, because under tensor parallelism they lie on two meshes, which no foreach operation mixes.
    return spread, adamw([{"params": params} for params in matrices_and_others(spread)])
