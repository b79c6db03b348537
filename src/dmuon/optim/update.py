"""The update rule of Muon on whole matrices: pure functions that know nothing about ranks.

The rule is that of `torch.optim.Muon`, after K. Jordan et al., "Muon: An optimizer for hidden layers in
neural networks" (2024), with decoupled weight decay as in arXiv:2502.16982:

    B <- mu B + (1 - mu) G
    U = (1 - mu) G + mu B  if nesterov else  B
    W <- (1 - lr wd) W - lr s(rows, cols) NewtonSchulz(U)

Newton-Schulz does not see the scale of U, so that the average written here and the sum `B <- mu B + G` of the
original give the same weights; what is kept in a checkpoint is the average, as torch keeps it. The first two
lines are `Variant.direction` in `variants.py`, the last is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

AdjustLR = Literal["original", "match_rms_adamw", "spectral", "none"]


@dataclass(frozen=True)
class UpdateRule:
    """The settings of one parameter group, validated.

    Attributes:
        lr: learning rate, before the shape's scale.
        momentum: mu, in [0, 1).
        weight_decay: decoupled, times `lr` (not times the scaled learning rate).
        nesterov: look ahead by one momentum step.
        adjust_lr_fn: how the update is scaled by its shape, see `shape_scale`.
        maximize: ascend instead of descend.
        cautious: decay an element only where the update brings it nearer to zero, too (arXiv:2510.12402).
    """

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    adjust_lr_fn: AdjustLR
    maximize: bool = False
    cautious: bool = False


def shape_scale(rows: int, cols: int, adjust_lr_fn: AdjustLR) -> float:
    """Factor on the learning rate for a matrix of this shape (the whole one, never a piece).

    "original" is sqrt(max(1, rows / cols)), "match_rms_adamw" is 0.2 sqrt(max(rows, cols))
    (arXiv:2502.16982), "spectral" is sqrt(rows / cols), of fan-out over fan-in, "none" is 1.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / cols))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if adjust_lr_fn == "spectral":
        return math.sqrt(rows / cols)
    return 1.0


def check_adjust_lr_fn(value: object) -> AdjustLR:
    """`value` if it names a scale (None: "original", as for torch), else ValueError with the names."""
    if value is None:
        return "original"
    if value not in get_args(AdjustLR):
        raise ValueError(f"adjust_lr_fn must be one of {get_args(AdjustLR)}, got {value!r}")
    return value  # type: ignore[return-value]


def apply_update(
    weight: Tensor, orthogonal: Tensor, live: Tensor | None, rule: UpdateRule, scale: float
) -> None:
    """Decay the weight and subtract the scaled orthogonal update, in place.

    weight, orthogonal: a parameter, or corresponding pieces; the arithmetic is done in the weight's dtype.
    live: None, or one element on the device; where it is 0, no rank had a gradient, `orthogonal` is 0, and
    the weight stays as it is. So nobody has to ask the device.
    scale: `shape_scale` of the whole matrix, whatever the piece.

    The result does not depend, not even in the last bit, on whether `live` is given.
    """
    if rule.weight_decay and rule.cautious:
        shrinks = weight * (orthogonal.to(weight.dtype) * weight >= 0)
        if live is not None:
            shrinks.mul_(live > 0)
        weight.sub_(shrinks, alpha=rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        factor = 1 - rule.lr * rule.weight_decay
        if live is None:
            weight.mul_(factor)
        else:  # as the line above, which computes in this dtype
            dtype = torch.promote_types(weight.dtype, torch.float32)
            decay = live.new_full((), factor, dtype=dtype)
            weight.copy_(weight.to(dtype) * torch.where(live > 0, decay, torch.ones_like(decay)))
    weight.add_(orthogonal.to(weight.dtype), alpha=-rule.lr * scale)


def check_rule(settings: Mapping[str, Any]) -> UpdateRule:
    """The rule that a parameter group's settings ask for.

    Raises:
        ValueError: for a setting out of range, by its name.
    """
    lr, momentum, decay = (_number(key, settings[key]) for key in ("lr", "momentum", "weight_decay"))
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr must be finite and >= 0, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not (math.isfinite(decay) and decay >= 0):
        raise ValueError(f"weight_decay must be finite and >= 0, got {decay}")
    return UpdateRule(
        lr=lr,
        momentum=momentum,
        weight_decay=decay,
        nesterov=bool(settings["nesterov"]),
        adjust_lr_fn=check_adjust_lr_fn(settings["adjust_lr_fn"]),
        maximize=bool(settings["maximize"]),
        cautious=bool(settings["cautious_weight_decay"]),
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise ValueError(f"{name} must be a number or a tensor with one element, got {value!r}")
