"""What owners do in a step, and each rank for its stacks: the first phase of `Muon.step`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.buffer import Update
from ..engine.parameter import DedicatedParam, local_part
from ..engine.queue import Ticket
from ..scratch import Scratch
from ..structure import Structure
from .parts import Recipe, scale_of, update_stack
from .state import local_state
from .team import Team
from .update import apply_update, check_rule

if TYPE_CHECKING:
    from .muon import Muon

# Of parameters that go into one batch: the shape, what they hold, and the ranks that hold copies.
_Kind = tuple[torch.Size, Structure, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Matrix:
    """A parameter that this rank orthogonalizes, and what is done to it; state, gradient: whole."""

    param: DedicatedParam
    state: dict[str, Tensor]
    gradient: Tensor
    update: Update


def owners_update(optimizer: Muon) -> dict[DedicatedParam, Update]:
    """Update all that Muon trains, without a collective but for stacks that replicas share.

    Returns what is to be published; the same parameters on all ranks.
    """
    updates: dict[DedicatedParam, Update] = {}
    scratch = Scratch(reuse=True)  # for this step
    shared: list[Ticket[None]] = []  # stacks whose replicas share the work
    for group in optimizer.param_groups:
        if group["algorithm"] != "muon":
            continue
        recipe = recipe_of(optimizer, group, scratch)
        mine: dict[_Kind, list[_Matrix]] = {}  # to be orthogonalized by this rank
        for param in _to_update(optimizer, group):
            param.check_gradient()
            scale = scale_of(param.structure, param.full_shape, recipe.rule.adjust_lr_fn)
            dtype = recipe.settings.compute_dtype(recipe.dtype, param.layout.device)
            update = Update(partial(apply_update, rule=recipe.rule, scale=scale), dtype)
            _advance(optimizer, param, update, recipe, mine)
            param.mark_updated()
            if param.is_published:
                updates[param] = update
        for (shape, structure, _), matrices in mine.items():
            count = recipe.at_once(structure, shape, matrices[0].gradient.device)
            for first in range(0, len(matrices), count):
                _orthogonalize(matrices[first : first + count], recipe)
        for stack in group["params"]:
            if id(stack) in optimizer._stacks and stack.grad is not None:
                shared += _update_stack(optimizer, stack, recipe)
    for ticket in shared:  # whoever reads these weights knows nothing of us
        ticket.wait()
    return updates


def recipe_of(optimizer: Muon, group: Mapping[str, Any], scratch: Scratch) -> Recipe:
    """How the matrices of a group of Muon's are updated."""
    settings = optimizer._settings(group)
    return Recipe(optimizer.variant, check_rule(group), settings, optimizer.momentum_dtype, scratch)


def _to_update(optimizer: Muon, group: Mapping[str, Any]) -> Iterator[DedicatedParam]:
    """The dedicated parameters of a group that have a gradient; the same on all ranks."""
    for resting in group["params"]:
        param = optimizer._record(resting)
        if param is not None and resting.grad is not None:
            yield param


def _advance(
    optimizer: Muon,
    param: DedicatedParam,
    update: Update,
    recipe: Recipe,
    mine: dict[_Kind, list[_Matrix]],
) -> None:
    """A matrix that is whole here is put down in `mine`; of one that has a team, this rank's part is made
    ready for the publish."""
    state = local_state(optimizer, param.resting)
    if not param.in_owner_row:
        return
    update.live = param.gradient_count
    gradient = param.local_gradient()
    if param.has_team:
        update.part = torch.empty(gradient.shape, dtype=recipe.dtype, device=gradient.device)
        recipe.direction(gradient, state, update.live, update.part)
        update.team = Team(recipe.settings)
    elif param.keeps_state:
        # What other ranks orthogonalize too, because tensor parallelism does not cut it, goes only with
        # others of the kind: rounding depends on the batch, and all copies have to come out alike.
        copies = param.tp.copies if param.tp is not None else None
        kind = (param.full_shape, param.structure, copies)
        mine.setdefault(kind, []).append(_Matrix(param, state, gradient, update))


def _orthogonalize(matrices: Sequence[_Matrix], recipe: Recipe) -> None:
    """Update parameters of one kind, in one batch; what has to travel is put into their updates, the other
    weights are updated."""
    first = matrices[0].gradient
    structure = matrices[0].param.structure
    batch = recipe.buffer(len(matrices), first.shape, first.device)
    for matrix, slot in zip(matrices, batch, strict=True):
        held = {name: matrix.state[name] for name in recipe.variant.elementwise}
        recipe.direction(matrix.gradient, held, matrix.update.live, slot)
    result = recipe.orthogonalize(batch, structure)
    for matrix, orthogonal in zip(matrices, result, strict=True):
        param, update = matrix.param, matrix.update
        held = {name: tensor[None] for name, tensor in matrix.state.items()}
        recipe.finish(orthogonal[None], structure, held, update.live)
        if update.live is not None:
            orthogonal.mul_(update.live > 0)
        if param.is_published:  # a copy: the buffer serves the next batch, and each goes when it is sent
            update.orthogonal = orthogonal.to(update.dtype, copy=True)
        else:
            update.apply(param.resting_local, orthogonal, update.live)
    recipe.scratch.give_back(batch, *(() if result is batch else (result,)))


def _update_stack(optimizer: Muon, stack: Tensor, recipe: Recipe) -> list[Ticket[None]]:
    """The matrices of a stack that lie here; under HSDP, this replica's part of them."""
    assert stack.grad is not None
    runtime = optimizer._runtime
    has_replicas = isinstance(stack, DTensor) and stack.device_mesh == runtime.layout.mesh
    to_share = update_stack(
        local_part(stack),
        local_part(stack.grad),
        local_state(optimizer, stack),
        optimizer._stacks[id(stack)],
        recipe,
        replicas=runtime.layout.replicate_size if has_replicas else 1,
        replica=runtime.layout.here.replicate,
    )
    return [runtime.share(optimizer._names[id(stack)], *to_share)] if to_share is not None else []
