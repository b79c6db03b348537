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
from .newton_schulz import Settings
from .parts import orthogonalize_parts, scale_of
from .team import Team
from .update import UpdateRule, check_rule, last_direction, shape_scale

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
        rule, settings = check_rule(group), optimizer._settings(group)
        for resting in group["params"]:
            if resting.grad is not None:
                param = optimizer._record(resting)
                structure = param.structure if param is not None else optimizer._stacks[id(resting)]
                mesh = param.mesh if param is not None else getattr(resting, "device_mesh", widest)
                sums = _Sums()
                if _is_counted(mesh, widest):
                    sums = _sums(optimizer, resting, structure, rule, settings, scratch)
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


def _sums(
    optimizer: Muon,
    resting: torch.Tensor,
    structure: Structure,
    rule: UpdateRule,
    settings: Settings,
    scratch: Scratch,
) -> _Sums:
    param = optimizer._record(resting)
    if param is None:
        if isinstance(resting, DTensor) and not is_first_copy(resting):
            return _Sums()
        momentum, gradient = (local_part(t) for t in (optimizer._stack_momentum(resting), resting.grad))  # type: ignore[arg-type]
        sums = _Sums(weight=_square(local_part(resting)))
    else:
        momentum = optimizer._momentum(param)
        first = param.in_owner_row and (param.tp is None or param.tp.copies[0] == dist.get_rank())
        gradient = param.local_gradient() if param.in_owner_row else None  # type: ignore[assignment]
        sums = _Sums(weight=_square(param.resting_local)) if first else _Sums()
        if param.has_team and param.in_owner_row:
            of_team = _look_at_teams_update(optimizer, param, momentum, gradient, rule, settings)
            of_team.weight = sums.weight
            return of_team if first else sums
        if not (first and param.keeps_state):
            return sums
    sums.gradient, sums.momentum = _square(gradient), _square(momentum)
    if momentum.numel():
        for part in structure.parts(gradient):
            sums.idle = sums.idle + (structure.as_matrices(part) == 0).all(-1).all(-1).sum()
        _look_at_update(sums, momentum, gradient, structure, rule, settings, scratch)
    return sums


def _look_at_update(
    sums: _Sums,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    structure: Structure,
    rule: UpdateRule,
    settings: Settings,
    scratch: Scratch,
) -> None:
    """The step's update once more: the momentum has been advanced."""
    direction = last_direction(momentum, gradient, rule)
    shape = tuple(direction.shape)
    common = scale_of(structure, shape, rule.adjust_lr_fn)
    update = orthogonalize_parts(direction[None], structure, rule.adjust_lr_fn, settings, scratch)[0]
    sums.update = _square(update) * common**2
    kinds = structure.matrices(shape)
    for part, (_, rows, cols) in zip(structure.parts(update), kinds, strict=True):
        ratio = shape_scale(rows, cols, rule.adjust_lr_fn) / common
        for matrix in structure.as_matrices(part):
            matrix = matrix.float() / ratio
            matrix = matrix.T if rows > cols else matrix
            gram = matrix @ matrix.T
            if matrix.any():  # an idle expert has no update
                gram.diagonal().sub_(1)
            sums.residual = sums.residual + _square(gram)


def _look_at_teams_update(
    optimizer: Muon,
    param: DedicatedParam,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    rule: UpdateRule,
    settings: Settings,
) -> _Sums:
    """Likewise, on all ranks of a team, of this one's parts."""
    communication, tp = optimizer._runtime.communication, param.tp
    assert communication is not None
    assert tp is not None
    sums = _Sums(_square(gradient), _square(momentum))

    def look() -> None:
        peers, team, shape = communication.team(param.param_name, tp.ranks), Team(settings), param.full_shape
        direction = last_direction(momentum, gradient, rule)
        update = team.orthogonalize([direction], [shape], peers)[0]
        sums.update = _square(update) * scale_of(param.structure, shape, rule.adjust_lr_fn) ** 2
        sums.residual = team.residual(update, shape, peers)
        has_any = peers.all_gather((gradient != 0).any().float().view(1)).any()
        sums.idle = (~has_any).double() if peers.position == 0 else 0.0

    communication.weights.put("metrics", param.param_name, look).wait()
    return sums


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of all elements, in float64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
