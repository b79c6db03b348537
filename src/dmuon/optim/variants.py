"""What a gradient and some state make of an update: plain Muon, its relatives, and the seam for one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .update import UpdateRule

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class State:
    """A tensor that a variant keeps for each parameter. It begins with zeros.

    Attributes:
        name: in the optimizer's state, and so in checkpoints.
        per: "element": of the parameter's shape, and it lies where the momentum lies. "row": a number for
            each row (output) of each matrix; with whoever runs Newton-Schulz.
        dtype: None for that of the momentum (`momentum_dtype` of `Muon`).
    """

    name: str
    per: Literal["element", "row"] = "element"
    dtype: torch.dtype | None = None


class Variant:
    """Plain Muon, and what its relatives derive from.

    `direction` says what is orthogonalized, `finish` what becomes of it. Both advance the state in place. All
    else is the same for every variant: where tensors lie, Newton-Schulz, scale, decay, checkpoints.

    Attributes:
        states: what is kept, all of it.
    """

    states: ClassVar[tuple[State, ...]] = (State(MOMENTUM),)

    def direction(
        self,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        rule: UpdateRule,
        live: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write what Newton-Schulz is to orthogonalize into `out`.

        Element by element: it is called with whole parameters, with several at once, and with parts.

        Args:
            gradient: to be descended along; in the dtype of the momentum. Read only.
            state: those of `states` that are per element, by name; shaped like the gradient.
            rule: the settings of the parameter group.
            live: None, or one element on the device: where it is 0, no rank had a gradient, and the state
                stays as it is (`ema_` sees to it); what is written is not used.
            out: shaped like the gradient, uninitialised.
        """
        momentum = state[MOMENTUM]
        ema_(momentum, gradient, rule.momentum, live)
        if rule.nesterov:
            torch.lerp(gradient, momentum, rule.momentum, out=out)
        else:
            out.copy_(momentum)

    def finish(
        self, orthogonal: Tensor, state: Mapping[str, Tensor], rule: UpdateRule, live: Tensor | None
    ) -> Tensor:
        """The update, before the shape's scale, from orthogonalized matrices; here: they are it.

        A variant that has this method sees whole matrices, so that it has no teams.

        Args:
            orthogonal: [matrices, rows, cols] as [out, in], in the dtype of Newton-Schulz. It may be written
                to.
            state: all `states` by name: [matrices, rows, 1], or [matrices, rows, cols].
            rule: as for `direction`.
            live: as for `direction`.

        Returns:
            [matrices, rows, cols]; whoever applies it casts it.
        """
        return orthogonal

    @property
    def name(self) -> str:
        """For messages."""
        return "Muon" if type(self) is Variant else type(self).__name__

    @property
    def elementwise(self) -> list[str]:
        """The names of the states per element."""
        return [state.name for state in self.states if state.per == "element"]

    @property
    def finishes(self) -> bool:
        """Whether it has a `finish` of its own."""
        return type(self).finish is not Variant.finish


class NorMuon(Variant):
    """NorMuon (arXiv:2510.05491): the rows (neurons) of an update get about the same size.

    With O the orthogonalized m x n matrix, and v a number for each row:

        v <- beta2 v + (1 - beta2) mean over the row of O^2
        N = O / (sqrt(v) + eps)
        update = sqrt(min(m, n)) N / ||N||_F

    The last line gives it the norm of a matrix that is exactly orthogonal. With
    `adjust_lr_fn="match_rms_adamw"` the weight so moves by lr 0.2 sqrt(m n) N / ||N||_F, the paper's line.

    Args:
        beta2: of the average of squares, in [0, 1).
        eps: added to the root of it; positive.
    """

    states: ClassVar[tuple[State, ...]] = (
        State(MOMENTUM),
        State("second_momentum_buffer", per="row", dtype=torch.float32),
    )

    def __init__(self, beta2: float = 0.95, eps: float = 1e-8) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 must be in [0, 1), got {beta2}")
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"eps must be finite and > 0, got {eps}")
        self.beta2, self.eps = beta2, eps

    def finish(
        self, orthogonal: Tensor, state: Mapping[str, Tensor], rule: UpdateRule, live: Tensor | None
    ) -> Tensor:
        """See the class."""
        squares = state["second_momentum_buffer"]
        matrix = orthogonal.to(squares.dtype)
        ema_(squares, matrix.square().mean(-1, keepdim=True), self.beta2, live)
        matrix = matrix / squares.sqrt().add_(self.eps)
        norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
        norm.clamp_(min=torch.finfo(norm.dtype).tiny)  # of an idle expert's update, which is zero
        return matrix.mul_(math.sqrt(min(matrix.shape[-2:])) / norm)


def ema_(average: Tensor, value: Tensor, decay: float, live: Tensor | None) -> None:
    """average <- decay average + (1 - decay) value, in place; where `live` is 0 it stays as it is, bit by
    bit. So nobody has to ask the device.

    The result does not depend, not even in the last bit, on whether `live` is given: copies differ in that.
    """
    value = value.to(average.dtype)
    if live is None:
        average.lerp_(value, 1 - decay)
    else:  # as the line above, which computes in this dtype
        dtype = torch.promote_types(average.dtype, torch.float32)
        step = live.new_full((), 1 - decay, dtype=dtype)
        step = torch.where(live > 0, step, torch.zeros_like(step))
        average.copy_(torch.lerp(average.to(dtype), value.to(dtype), step))


def check_variant(variant: object) -> Variant:
    """`variant` if it is one, with states that can be kept.

    Raises:
        TypeError: for anything else; for a class, where an instance is wanted.
        ValueError: for states of one name, or of a kind that there is not.
    """
    if not isinstance(variant, Variant):
        raise TypeError(
            f"variant must be an instance of dmuon.Variant, such as dmuon.NorMuon(), got {variant!r}"
        )
    names = [state.name for state in variant.states]
    if len(set(names)) != len(names):
        raise ValueError(f"{type(variant).__name__} has two states of one name: {names}")
    for state in variant.states:
        if state.per not in ("element", "row"):
            raise ValueError(f"state {state.name!r} is per {state.per!r}; it must be 'element' or 'row'")
        if state.dtype is not None and not state.dtype.is_floating_point:
            raise ValueError(f"state {state.name!r} has dtype {state.dtype}; it must be a floating-point one")
    return variant
