"""How the matrices of a parameter group are updated: parameters may hold several, each is treated by itself,
and scaled by its own shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.collectives import Parts
from ..scratch import Scratch
from ..structure import Structure
from .newton_schulz import Settings, orthogonalize
from .products import matrices_at_once
from .update import AdjustLR, UpdateRule, apply_update, shape_scale
from .variants import Variant

State = Mapping[str, Tensor]


def scale_of(structure: Structure, shape: tuple[int, ...], adjust_lr_fn: AdjustLR) -> float:
    """The scale by which a parameter's update is applied: that of its first kind of matrix, to which
    `Recipe.even_out` brings the others.

    shape: of the whole parameter.
    """
    _, rows, cols = structure.matrices(shape)[0]
    return shape_scale(rows, cols, adjust_lr_fn)


@dataclass(frozen=True)
class Recipe:
    """What is done to each matrix of one parameter group, from the gradient to the update.

    Attributes:
        dtype: of the momentum, and of what is orthogonalized.
        scratch: buffers that serve one batch of matrices after the other.
    """

    variant: Variant
    rule: UpdateRule
    settings: Settings
    dtype: torch.dtype
    scratch: Scratch

    def at_once(self, structure: Structure, shape: tuple[int, ...], device: torch.device) -> int:
        """How many parameters of one shape go into one batch; at least 1."""
        count, rows, cols = structure.matrices(shape)[0]
        dtype = self.settings.compute_dtype(self.dtype, device)
        return max(1, matrices_at_once(rows, cols, dtype, device) // max(1, count))

    def buffer(self, count: int, shape: torch.Size, device: torch.device) -> Tensor:
        """For the directions of some parameters of one shape, [count, *shape]; it goes back to `scratch`."""
        return self.scratch.take(count * shape.numel(), self.dtype, device).view(count, *shape)

    def direction(self, gradient: Tensor, state: State, live: Tensor | None, out: Tensor) -> None:
        """Advance the state, and write what is to be orthogonalized into `out`; see `Variant.direction`.

        All are shaped alike; out: in the dtype of the momentum.
        """
        gradient = gradient.to(out.dtype)
        gradient = gradient.neg() if self.rule.maximize else gradient
        self.variant.direction(gradient, state, self.rule, live, out)

    def orthogonalize(self, batch: Tensor, structure: Structure) -> Tensor:
        """Each matrix of each parameter, orthogonalized.

        batch: [parameters, *shape], contiguous; it may be written to. Returns the same shape: the batch
        itself, or a buffer from `scratch` in the compute dtype.
        """
        if batch.numel() == 0:
            return batch
        if not structure.sizes and batch.ndim == 3:
            return orthogonalize(batch, self.settings, self.scratch)
        dtype = self.settings.compute_dtype(batch.dtype, batch.device)
        for part, (_, rows, cols) in zip(
            structure.parts(batch), structure.matrices(batch.shape[1:]), strict=True
        ):
            matrices = structure.as_matrices(part)
            for some in matrices.split(matrices_at_once(rows, cols, dtype, batch.device)):
                result = orthogonalize(some, self.settings, self.scratch)
                some.copy_(result)
                self.scratch.give_back(result)
            if not _shares_memory(matrices, batch):
                structure.write(part, matrices)
        return batch

    def finish(self, batch: Tensor, structure: Structure, state: State, live: Tensor | None) -> None:
        """Make updates of what `orthogonalize` has returned, in place; the state goes on with it.

        batch: [parameters, *shape]. state: [parameters, ...], of all of them.
        """
        if self.variant.finishes:
            shape = batch.shape[1:]
            counts = structure.row_counts(shape)
            cells = {name: structure.parts(state[name]) for name in self.variant.elementwise}
            rows = {name: state[name].split(counts, -1) for name in state if name not in cells}
            for kind, (part, (_, height, _)) in enumerate(
                zip(structure.parts(batch), structure.matrices(shape), strict=True)
            ):
                held = {name: each[kind].reshape(-1, height, 1) for name, each in rows.items()}
                held |= {name: structure.as_matrices(each[kind]) for name, each in cells.items()}
                result = self.variant.finish(structure.as_matrices(part), held, self.rule, live)
                structure.write(part, result)
                for name, each in rows.items():  # where matrices could be had as copies only
                    if not _shares_memory(held[name], state[name]):
                        each[kind].copy_(held[name].view(each[kind].shape))
                for name, each in cells.items():
                    if not _shares_memory(held[name], state[name]):
                        structure.write(each[kind], held[name])
        self._even_out(batch, structure)

    def _even_out(self, batch: Tensor, structure: Structure) -> None:
        """Multiply each kind of matrix by the ratio of its scale to that of the first one."""
        if not structure.is_cut:
            return
        kinds = structure.matrices(batch.shape[1:])
        scales = [shape_scale(rows, cols, self.rule.adjust_lr_fn) for _, rows, cols in kinds]
        for part, scale in zip(structure.parts(batch), scales, strict=True):
            if scale != scales[0]:
                part.mul_(scale / scales[0])


def _shares_memory(view: Tensor, tensor: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def update_stack(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    structure: Structure,
    recipe: Recipe,
    *,
    replicas: int = 1,
    replica: int = 0,
) -> tuple[Parts, Callable[[], None]] | None:
    """Update the matrices that this rank holds of a stack; no collective.

    weight, gradient: [how many, ..., rows, cols], perhaps none; contiguous. state: likewise, or a number for
    each row in place of the last two dims.
    replicas, replica: how many ranks hold the same, and which of them this one is. They share Newton-Schulz.

    Returns None if all is done. Of replicas: what each has to send the others, and what updates the weight
    afterwards.
    """
    if not weight.numel():
        return None
    leading = structure.stacked(weight.shape)
    shape = weight.shape[leading:]
    weight, gradient = weight.view(-1, *shape), gradient.view(-1, *shape)
    state = {name: tensor.flatten(0, leading - 1) for name, tensor in state.items()}
    scale = scale_of(structure, shape, recipe.rule.adjust_lr_fn)
    some = recipe.at_once(structure, shape, weight.device)
    share = -(-len(weight) // replicas)
    dtype = recipe.settings.compute_dtype(recipe.dtype, weight.device)
    updates = torch.empty(weight.shape, dtype=dtype, device=weight.device) if replicas > 1 else None

    def finish(matrices: slice, orthogonal: Tensor) -> None:
        held = {name: tensor[matrices] for name, tensor in state.items()}
        recipe.finish(orthogonal, structure, held, None)
        apply_update(weight[matrices], orthogonal, None, recipe.rule, scale)

    batches = [
        (number, slice(first, min(first + some, end)))
        for number, (begin, end) in enumerate(
            (i * share, min((i + 1) * share, len(weight))) for i in range(replicas)
        )
        for first in range(begin, end, some)
    ]
    for number, matrices in batches:
        batch = recipe.buffer(matrices.stop - matrices.start, shape, weight.device)
        held = {name: state[name][matrices] for name in recipe.variant.elementwise}
        recipe.direction(gradient[matrices], held, None, batch)
        used = [batch]
        if number == replica:
            result = recipe.orthogonalize(batch, structure)
            used += [] if result is batch else [result]
            if updates is None:
                finish(matrices, result)
            else:
                updates[matrices].copy_(result)
        recipe.scratch.give_back(*used)
    if updates is None:
        return None

    def finish_all() -> None:
        for _, matrices in batches:
            finish(matrices, updates[matrices])

    return [(number, u.view(-1)) for number, u in enumerate(updates.split(share))], finish_all
