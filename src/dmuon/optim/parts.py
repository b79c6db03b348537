"""Newton-Schulz of parameters that hold several matrices: each by itself, scaled by its own shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..engine.collectives import Parts
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
    *,
    replicas: int = 1,
    replica: int = 0,
) -> tuple[Parts, Callable[[], None]] | None:
    """Momentum, Newton-Schulz and update of the matrices that this rank holds of a stack; no collective.

    weight, momentum, gradient: [how many, ..., rows, cols], perhaps none; contiguous.
    replicas, replica: how many ranks hold the same, and which of them this one is. They share the work.

    Returns None if all is done. Of replicas: what each has to send the others, and what updates the weight
    afterwards.
    """
    if not weight.numel():
        return None
    shape = weight.shape[structure.stacked(weight.shape) :]
    weights, momenta, gradients = (t.view(-1, *shape) for t in (weight, momentum, gradient))
    scale = scale_of(structure, shape, rule.adjust_lr_fn)
    some = params_at_once(structure, shape, settings, momentum)
    if replicas == 1:
        for w, m, g in zip(weights.split(some), momenta.split(some), gradients.split(some), strict=True):
            apply_update(w, _orthogonal(m, g, structure, rule, settings, scratch), None, rule, scale)
        return None
    share = -(-len(weights) // replicas)
    dtype = settings.compute_dtype(momentum.dtype, momentum.device)
    updates = torch.empty(weights.shape, dtype=dtype, device=weight.device)
    for number, (u, m, g) in enumerate(
        zip(updates.split(share), momenta.split(share), gradients.split(share), strict=True)
    ):
        if number != replica:
            momentum_step(m, g, rule)  # theirs is the rest
            continue
        for mine, m_, g_ in zip(u.split(some), m.split(some), g.split(some), strict=True):
            mine.copy_(_orthogonal(m_, g_, structure, rule, settings, scratch))
    parts = [(number, u.view(-1)) for number, u in enumerate(updates.split(share))]
    return parts, partial(apply_update, weights, updates, None, rule, scale)


def _orthogonal(
    momenta: Tensor,
    gradients: Tensor,
    structure: Structure,
    rule: UpdateRule,
    settings: Settings,
    scratch: Scratch,
) -> Tensor:
    """Advance some momenta, and return the orthogonalized directions: a buffer from `scratch`, given back,
    which is good until the next call."""
    batch = scratch.take(momenta.numel(), momenta.dtype, momenta.device).view(momenta.shape)
    momentum_step(momenta, gradients, rule, out=batch)
    result = orthogonalize_parts(batch, structure, rule.adjust_lr_fn, settings, scratch)
    scratch.give_back(batch, *(() if result is batch else (result,)))
    return result
