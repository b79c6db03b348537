"""Newton-Schulz of parameters that hold several matrices: each by itself, scaled by its own shape."""

from __future__ import annotations

from torch import Tensor

from ..scratch import Scratch
from ..structure import Structure
from .newton_schulz import Settings, orthogonalize
from .products import matrices_at_once
from .update import AdjustLR, UpdateRule, apply_update, momentum_step, shape_scale


def scale_of(structure: Structure, shape: tuple[int, ...], adjust_lr_fn: AdjustLR) -> float:
    """The scale by which a parameter's update is applied: that of its first kind of matrix, to which
    `orthogonalize_parts` brings the others.

    shape: of the whole parameter.
    """
    _, rows, cols = structure.matrices(shape)[0]
    return shape_scale(rows, cols, adjust_lr_fn)


def params_at_once(structure: Structure, shape: tuple[int, ...], settings: Settings, like: Tensor) -> int:
    """How many parameters of one shape go into one batch; at least 1."""
    count, rows, cols = structure.matrices(shape)[0]
    dtype = settings.compute_dtype(like.dtype, like.device)
    return max(1, matrices_at_once(rows, cols, dtype, like.device) // max(1, count))


def orthogonalize_parts(
    batch: Tensor, structure: Structure, adjust_lr_fn: AdjustLR, settings: Settings, scratch: Scratch
) -> Tensor:
    """Each matrix of each parameter, orthogonalized; one of another shape than the first kind times the
    ratio of their scales.

    batch: [parameters, *shape], contiguous; it may be written to. Returns the same shape: the batch itself,
    or a buffer from `scratch` in the compute dtype.
    """
    if batch.numel() == 0:
        return batch
    shape = batch.shape[1:]
    if not structure.sizes and batch.ndim == 3:
        return orthogonalize(batch, settings, scratch)
    dtype = settings.compute_dtype(batch.dtype, batch.device)
    common = scale_of(structure, shape, adjust_lr_fn)
    kinds = structure.matrices(shape)
    for part, (_, rows, cols) in zip(structure.parts(batch), kinds, strict=True):
        matrices = structure.as_matrices(part)
        ratio = shape_scale(rows, cols, adjust_lr_fn) / common
        for some in matrices.split(matrices_at_once(rows, cols, dtype, batch.device)):
            result = orthogonalize(some, settings, scratch)
            some.copy_(result if ratio == 1 else result.mul_(ratio))
            scratch.give_back(result)
        if matrices.untyped_storage().data_ptr() != batch.untyped_storage().data_ptr():
            structure.write(part, matrices)
    return batch


def update_stack(
    weight: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    structure: Structure,
    rule: UpdateRule,
    settings: Settings,
    scratch: Scratch,
) -> None:
    """Momentum, Newton-Schulz and update of the matrices that this rank holds of a stack; no collective.

    weight, momentum, gradient: [how many, ..., rows, cols], perhaps none; contiguous.
    """
    if not weight.numel():
        return
    shape = weight.shape[structure.stacked(weight.shape) :]
    weights, momenta, gradients = (t.view(-1, *shape) for t in (weight, momentum, gradient))
    scale = scale_of(structure, shape, rule.adjust_lr_fn)
    some = params_at_once(structure, shape, settings, momentum)
    for w, m, g in zip(weights.split(some), momenta.split(some), gradients.split(some), strict=True):
        batch = scratch.take(m.numel(), m.dtype, m.device).view(m.shape)
        momentum_step(m, g, rule, out=batch)
        result = orthogonalize_parts(batch, structure, rule.adjust_lr_fn, settings, scratch)
        apply_update(w, result, None, rule, scale)
        scratch.give_back(batch, *(() if result is batch else (result,)))
