"""What the last step did, in numbers, computed where the matrices lie."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..clip import groups_of, is_first_copy
from ..engine.agreement import ranks_of
from ..engine.parameter import DedicatedParam, local_part
from ..scratch import Scratch
from ..structure import Structure
from .owners import recipe_of
from .parts import Recipe, scale_of
from .state import local_state
from .team import Team
from .variants import MOMENTUM

if TYPE_CHECKING:
    from .muon import Muon


@dataclass
class _Sums:
    """Of one parameter, what this rank adds: squares of all elements, or sums over all matrices."""

    gradient: torch.Tensor | float = 0.0
    momentum: torch.Tensor | float = 0.0
    update: torch.Tensor | float = 0.0
    weight: torch.Tensor | float = 0.0
    residual: torch.Tensor | float = 0.0
    idle: torch.Tensor | float = 0.0

    def row(self, device: torch.device) -> torch.Tensor:
        """[6], float64."""
        return torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device) for v in vars(self).values()]
        )


@dataclass(frozen=True)
class _Measured:
    """One parameter of Muon's: what this rank adds, and what the sums are divided by."""

    name: str
    sums: _Sums
    numel: int
    matrices: int
    sides: int  # the shorter sides of all its matrices, summed


def measure(optimizer: Muon, groups: Mapping[str, str] | None) -> dict[str, float]:
    """See `Muon.metrics`."""
    runtime = optimizer._runtime
    widest = ranks_of(runtime.params)
    measured = list(_all(optimizer, widest))
    if not measured:
        raise RuntimeError("metrics() is for between step() and zero_grad(): there are no gradients")
    table = torch.stack([each.sums.row(runtime.layout.device) for each in measured])
    for group in groups_of(widest):
        dist.all_reduce(table, group=group)
    rows = table.tolist()
    chosen = {each.name: each.name for each in measured} if groups is None else groups
    found: dict[str, float] = {}
    for name, pattern in chosen.items():
        exact = groups is None
        places = [
            place
            for place, each in enumerate(measured)
            if (each.name == pattern if exact else fnmatch.fnmatchcase(each.name, pattern))
        ]
        if not places:
            raise ValueError(f"metrics: no parameter of Muon's with a gradient has a name like {pattern!r}")
        sums = [math.fsum(column) for column in zip(*(rows[place] for place in places), strict=True)]
        numel = sum(measured[place].numel for place in places)
        found[f"gradient_norm/{name}"] = sums[0] ** 0.5
        found[f"momentum_norm/{name}"] = sums[1] ** 0.5
        found[f"update_rms/{name}"] = (sums[2] / numel) ** 0.5
        found[f"weight_rms/{name}"] = (sums[3] / numel) ** 0.5
        found[f"orthogonality_residual/{name}"] = (sums[4] / sum(measured[p].sides for p in places)) ** 0.5
        found[f"idle_share/{name}"] = sums[5] / sum(measured[p].matrices for p in places)
    return found


def _all(optimizer: Muon, widest: DeviceMesh) -> Iterator[_Measured]:
    """widest: the mesh over which sums are taken."""
    scratch = Scratch(reuse=True)
    for group in optimizer.param_groups:
        if group["algorithm"] != "muon":
            continue
        recipe = recipe_of(optimizer, group, scratch)
        for resting in group["params"]:
            if resting.grad is not None:
                param = optimizer._record(resting)
                structure = param.structure if param is not None else optimizer._stacks[id(resting)]
                mesh = param.mesh if param is not None else getattr(resting, "device_mesh", widest)
                sums = _Sums()
                if _is_counted(mesh, widest):
                    sums = _sums(optimizer, resting, structure, recipe)
                kinds = structure.matrices(resting.shape)
                matrices = sum(count for count, _, _ in kinds)
                sides = sum(count * min(rows, cols) for count, rows, cols in kinds)
                yield _Measured(optimizer._names[id(resting)], sums, resting.numel(), matrices, sides)


def _is_counted(mesh: DeviceMesh, widest: DeviceMesh) -> bool:
    """Whether this rank's part of a tensor on `mesh` counts: it is there once for each rank of other dims."""
    inside = set(mesh.mesh.flatten().tolist())
    coordinate = widest.get_coordinate()
    assert coordinate is not None
    others = (d for d in range(widest.ndim) if not inside.issuperset(_ranks_along(widest, d)))
    return all(coordinate[dim] == 0 for dim in others)


def _ranks_along(mesh: DeviceMesh, dim: int) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(dim))


def _sums(optimizer: Muon, resting: torch.Tensor, structure: Structure, recipe: Recipe) -> _Sums:
    param = optimizer._record(resting)
    if param is None:
        if isinstance(resting, DTensor) and not is_first_copy(resting):
            return _Sums()
        state, gradient = local_state(optimizer, resting), local_part(resting.grad)  # type: ignore[arg-type]
        sums = _Sums(weight=_square(local_part(resting)))
        leading = structure.stacked(gradient.shape)
        if gradient.numel():  # one matrix, or what it is fused of, behind the other
            gradient = gradient.flatten(0, leading - 1)
            state = {name: tensor.flatten(0, leading - 1) for name, tensor in state.items()}
    else:
        state = local_state(optimizer, resting)
        first = param.in_owner_row and (param.tp is None or param.tp.copies[0] == dist.get_rank())
        gradient = param.local_gradient() if param.in_owner_row else None  # type: ignore[assignment]
        sums = _Sums(weight=_square(param.resting_local)) if first else _Sums()
        if param.has_team and param.in_owner_row:
            of_team = _look_at_teams_update(optimizer, param, state, gradient, recipe)
            of_team.weight = sums.weight
            return of_team if first else sums
        if not (first and param.keeps_state):
            return sums
        gradient, state = gradient[None], {name: tensor[None] for name, tensor in state.items()}
    sums.gradient, sums.momentum = _square(gradient), _norm_of_momentum(state)
    if gradient.numel():
        for part in structure.parts(gradient):
            sums.idle = sums.idle + (structure.as_matrices(part) == 0).all(-1).all(-1).sum()
        count = param.gradient_count if param is not None else None
        _look_at_update(sums, gradient, state, structure, recipe, count)
    return sums


def _look_at_update(
    sums: _Sums,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    structure: Structure,
    recipe: Recipe,
    count: torch.Tensor | None,
) -> None:
    """The step's update once more. The state has been advanced, and without a gradient it stays as it is.

    count: of ranks that had a gradient, where it may be 0, and there was no update.
    """
    live = torch.zeros(1, device=gradient.device)
    directions = recipe.buffer(len(gradient), gradient.shape[1:], gradient.device)
    held = {name: state[name] for name in recipe.variant.elementwise}
    recipe.direction(gradient, held, live, directions)
    update = recipe.orthogonalize(directions, structure)
    if count is not None:
        update.mul_(count > 0)
    kinds = structure.matrices(update.shape[1:])
    for part, (_, rows, cols) in zip(structure.parts(update), kinds, strict=True):
        for matrix in structure.as_matrices(part):
            matrix = matrix.float()
            matrix = matrix.T if rows > cols else matrix
            gram = matrix @ matrix.T
            if matrix.any():  # an idle expert has no update
                gram.diagonal().sub_(1)
            sums.residual = sums.residual + _square(gram)
    recipe.finish(update, structure, state, live)
    if count is not None:
        update.mul_(count > 0)
    sums.update = _square(update) * scale_of(structure, update.shape[1:], recipe.rule.adjust_lr_fn) ** 2
    recipe.scratch.give_back(directions, *(() if update is directions else (update,)))


def _look_at_teams_update(
    optimizer: Muon,
    param: DedicatedParam,
    state: dict[str, torch.Tensor],
    gradient: torch.Tensor,
    recipe: Recipe,
) -> _Sums:
    """Likewise, on all ranks of a team, of this one's parts."""
    communication, tp = optimizer._runtime.communication, param.tp
    assert communication is not None
    assert tp is not None
    sums = _Sums(_square(gradient), _norm_of_momentum(state))

    def look() -> None:
        peers, team = communication.team(param.param_name, tp.ranks), Team(recipe.settings)
        direction = torch.empty(gradient.shape, dtype=recipe.dtype, device=gradient.device)
        recipe.direction(gradient, state, torch.zeros(1, device=gradient.device), direction)
        update = team.orthogonalize([direction], [param.full_shape], peers)[0]
        if param.gradient_count is not None:
            update.mul_(param.gradient_count > 0)
        scale = scale_of(param.structure, param.full_shape, recipe.rule.adjust_lr_fn)
        sums.update = _square(update) * scale**2
        sums.residual = team.residual(update, param.full_shape, peers)
        has_any = peers.all_gather((gradient != 0).any().float().view(1)).any()
        sums.idle = (~has_any).double() if peers.position == 0 else 0.0

    communication.weights.put("metrics", param.param_name, look).wait()
    return sums


def _norm_of_momentum(state: Mapping[str, torch.Tensor]) -> torch.Tensor | float:
    return _square(state[MOMENTUM]) if MOMENTUM in state else 0.0


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of all elements, in float64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
