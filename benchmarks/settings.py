"""What every contestant is given alike: the settings of Muon and of AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from parallel import is_projection

LR = 0.02  # of the projection matrices, scaled by sqrt(max(1, rows / cols))
MOMENTUM = 0.95
NESTEROV = True
NS_STEPS = 5
ADAMW_LR = 4e-3
ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8
WEIGHT_DECAY = 0.0  # of everything


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The projection matrices, which are Muon's, and all other parameters."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if is_projection(name, param)]
    return matrices, [param for name, param in named if not is_projection(name, param)]


def adamw(groups: Iterable[Any]) -> AdamW:
    """torch's AdamW, as every contestant that relies on it has it: fused, its fastest form on CPU too."""
    return AdamW(groups, lr=ADAMW_LR, betas=ADAMW_BETAS, eps=ADAMW_EPS, weight_decay=WEIGHT_DECAY, fused=True)


class Together:
    """Several optimizers that step one after the other."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
