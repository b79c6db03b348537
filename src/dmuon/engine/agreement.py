"""What all ranks of a model say, and whether it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .parameter import DedicatedParam
from .stack import Stack

T = TypeVar("T")


def ranks_of(params: Iterable[DedicatedParam]) -> DeviceMesh:
    """A mesh of all the ranks that share these parameters."""
    return max((param.mesh for param in params), key=lambda mesh: mesh.ndim)


def gather_objects(mesh: DeviceMesh | Sequence[DeviceMesh], value: T) -> list[T]:
    """What each rank of a mesh (or of several of one root) gives; collective over them. Anything that can be
    pickled, and small."""
    values = [value]
    meshes = [mesh] if isinstance(mesh, DeviceMesh) else mesh
    groups = {
        each.mesh_dim_names[dim] if each.mesh_dim_names else str(dim): each.get_group(dim)
        for each in meshes
        for dim in range(each.ndim)
        if each.size(dim) > 1
    }
    for _, group in sorted(groups.items()):  # the same on all ranks, whatever the order of the meshes
        parts: list[list[T]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def fingerprint(value: object) -> str:
    """Of something with a text; to compare it between ranks without sending it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def check_alike(model: nn.Module, params: Sequence[DedicatedParam], stacks: Sequence[Stack]) -> None:
    """Make sure that all ranks have chosen the same parameters, before the first collective about them.

    Asked over the meshes of all the model's DTensors, which do not depend on the choice.

    Raises:
        RuntimeError: on all ranks, with a parameter that only some have chosen, or have otherwise.
    """
    meshes = [params[0].layout.mesh]
    meshes += [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    meshes = list(dict.fromkeys(meshes))
    mine = {p.param_name: f"{tuple(p.full_shape)} {p.owner} {p.tp_owner} {p.structure}" for p in params}
    mine |= {stack.name: f"{stack.structure}" for stack in stacks}
    if len(set(gather_objects(meshes, fingerprint(list(mine.items()))))) == 1:
        return
    answers = gather_objects(meshes, mine)
    names = sorted(set().union(*answers), key=lambda name: (all(name in answer for answer in answers), name))
    name = next((n for n in names if len({answer.get(n) for answer in answers}) > 1), "their order")
    raise RuntimeError(
        f"the ranks have not chosen the same parameters: {name} is dedicated on some of them only, or has "
        "another shape or owner there. Give dedicate_params the same model, mesh and predicate on all ranks."
    )
