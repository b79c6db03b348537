"""Gradient clipping by the global norm, over gradients on any mix of meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .engine.collectives import explained
from .engine.parameter import reduce_what_is_due

Source = (
    nn.Module
    | torch.Tensor
    | Iterable[nn.Module]
    | Iterable[torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
)

_RULE = "all ranks clip, with gradients for the same parameters"
_EPS = 1e-6  # torch's, so that the coefficient is torch's as well


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: Source,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline: DeviceMesh | dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients, in place, so that their common norm is at most `max_norm`.

    The semantics are those of `torch.nn.utils.clip_grad_norm_` in one process that has the whole gradients:
    every gradient is multiplied by `min(1, max_norm / (norm + 1e-6))`. Gradients may be plain tensors, taken
    to be the same on every rank; DTensors on any meshes, cut evenly or not, by several mesh dims, or
    replicated (which counts once); and those of dedicated parameters, whole on their owner. A gradient with
    a Partial placement is first replaced by one with its parameter's own placements.

    Collective: all ranks call it, with gradients for the same parameters. Each sums the powers of its own
    elements; a scalar per distinct mesh is then all-reduced: once over the default group where the mesh has
    all of its ranks (and one scalar stands for all such meshes), else once over the group of each mesh dim of
    more than one rank. The scalars, and so the norm, are the same on all ranks of a mesh; on the other ranks
    they are as equal as the replicated gradients there. Plain tensors need no communication. Nothing waits
    for the device unless `error_if_nonfinite`. Call it after backward, when the gradients are complete.

    Args:
        model_or_params: a module or several (the model parts that a rank has under pipelining), or
            parameters: a tensor, or an iterable of tensors or of `(name, tensor)` pairs. Each counts once,
            however often it is listed.
        max_norm: the norm allowed, >= 0.
        norm_type: p of the p-norm, > 0; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite, on every rank, before anything is scaled.
            Otherwise the gradients are scaled by what comes out, as torch does: a NaN norm makes all of them
            NaN; an infinite one makes finite elements 0 and infinite ones NaN.
        pipeline: the mesh dim, or process group, of the ranks whose stages together are the model: the norm
            is that of all stages. All of them call it.

    Returns:
        The norm before clipping: a plain tensor without dims, float32 (float64 if any gradient is), on the
        device of the first gradient. 0 if there is no gradient.

    Raises:
        ValueError: for a `max_norm` or `norm_type` out of range, or on a rank outside a gradient's mesh.
        TypeError: if `model_or_params` holds something else than tensors.
        RuntimeError: if the norm is not finite and `error_if_nonfinite`.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be > 0 or math.inf, got {norm_type}")
    if not isinstance(model_or_params, (nn.Module, torch.Tensor)):
        model_or_params = list(model_or_params)
    reduce_what_is_due(_parameters(model_or_params))
    every = _parameters(model_or_params)  # only now: FSDP2 may have shown whole ones until then
    params = [param for param in every if param.grad is not None]
    if not params and pipeline is None:
        return torch.zeros((), device=_device_of(every))
    gradients = [_without_partial_sums(param) for param in params]
    norm = _global_norm(gradients, norm_type) if params else torch.zeros((), device=_device_of(every))
    if pipeline is not None:
        norm = _over_stages(norm, norm_type, pipeline)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {norm.item()}: they cannot be clipped. Skip "
            "the step, or pass error_if_nonfinite=False to scale them by it all the same."
        )
    coefficient = (max_norm / (norm + _EPS)).clamp(max=1.0)
    for locals_ in _by_device_and_dtype([gradient.local for gradient in gradients]):
        torch._foreach_mul_(locals_, coefficient.to(locals_[0].device))
    return norm


def _parameters(source: Source) -> list[torch.Tensor]:
    """The parameters meant, each once, in the order given."""
    if isinstance(source, nn.Module):
        return list(source.parameters())
    params: dict[torch.Tensor, None] = {}  # a set that keeps the order
    for item in [source] if isinstance(source, torch.Tensor) else source:
        if isinstance(item, nn.Module):
            params |= dict.fromkeys(item.parameters())
            continue
        param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                "expected modules, a tensor, or an iterable of tensors or of (name, tensor) pairs; it has a "
                f"{type(param).__name__}"
            )
        params[param] = None
    return list(params)


def _over_stages(norm: torch.Tensor, p: float, pipeline: DeviceMesh | dist.ProcessGroup) -> torch.Tensor:
    """The norm over all stages of a pipeline, from that of this rank's; in float32, so that stages whose
    gradients have other dtypes agree."""
    if isinstance(pipeline, DeviceMesh):
        pipeline = pipeline.get_group()
    norms = norm.float().reshape(1)
    if p == math.inf:
        return _max_over([pipeline], norms, p)
    return _sum_of_powers_over([pipeline], norms, p).pow(1 / p)


def _device_of(params: list[torch.Tensor]) -> torch.device | None:
    return params[0].device if params else None


@dataclass(frozen=True)
class _Gradient:
    """This rank's part of a gradient, and whom it has to be added up with."""

    local: torch.Tensor  # may be empty
    mesh: DeviceMesh | None  # None: a plain tensor
    counts_here: bool  # False on ranks with a copy that another rank of the mesh counts


def _without_partial_sums(param: torch.Tensor) -> _Gradient:
    """The gradient of a parameter; one that is not yet summed over some mesh dim is replaced by its sum."""
    gradient = param.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return _Gradient(gradient, None, True)
    mesh = gradient.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of {mesh}, where a gradient lives")
    if any(placement.is_partial() for placement in gradient.placements):
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            placements = param.placements
        else:
            placements = tuple(Replicate() if p.is_partial() else p for p in gradient.placements)
        gradient = param.grad = gradient.redistribute(placements=placements)
    # Not DTensor's own norm: it takes pieces for even chunks, which those of dedicated parameters are not.
    return _Gradient(gradient.to_local(), mesh, is_first_copy(gradient))


def is_first_copy(tensor: DTensor) -> bool:
    """Whether no earlier rank of its mesh has the same part; on a rank of the mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())


def groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups that, one after the other, make a sum over all ranks of a mesh."""
    if mesh is None:
        return ()
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return (dist.group.WORLD,) if mesh.size() > 1 else ()
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


@dataclass
class _Share:
    """This rank's part in one sum."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device  # where the groups communicate
    locals: list[torch.Tensor] = field(default_factory=list)  # not empty ones


def _global_norm(gradients: list[_Gradient], p: float) -> torch.Tensor:
    """The p-norm over all elements of all gradients."""
    device = gradients[0].local.device
    double = any(gradient.local.dtype == torch.float64 for gradient in gradients)
    dtype = torch.float64 if double else torch.float32
    shares: dict[tuple, _Share] = {}
    by_mesh: dict[DeviceMesh | None, _Share] = {}
    for gradient in gradients:
        share = by_mesh.get(gradient.mesh)
        if share is None:
            groups = groups_of(gradient.mesh)
            # A mesh is known by its ranks: libraries make several meshes of the same ones.
            key = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            where = device if gradient.mesh is None else torch.device(gradient.mesh.device_type)
            share = by_mesh[gradient.mesh] = shares.setdefault(key, _Share(groups, where))
        if gradient.counts_here and gradient.local.numel():  # an empty tensor has no maximum
            share.locals.append(gradient.local)
    totals = []
    for share in shares.values():  # the same ones, in the same order, on every rank
        mine = _norms(share.locals, p, dtype, share.device)
        reduce = _max_over if p == math.inf else _sum_of_powers_over
        totals.append(reduce(share.groups, mine, p).to(device))
    joined = torch.stack(totals)
    return joined.max() if p == math.inf else joined.sum().pow(1 / p)


def _norms(locals_: list[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The p-norm of each tensor, computed in `dtype`. shape: (number of tensors + 1,); one more that is 0."""
    norms = [torch.zeros((), dtype=dtype, device=device)]
    for same in _by_device_and_dtype(locals_):
        norms += [norm.to(device) for norm in torch._foreach_norm(same, p, dtype=dtype)]
    return torch.stack(norms)


def _sum_of_powers_over(groups: Iterable[dist.ProcessGroup], norms: torch.Tensor, p: float) -> torch.Tensor:
    total = norms.pow(p).sum()
    for group in groups:
        with explained("the all-reduce of the gradients' norm", _RULE):
            dist.all_reduce(total, group=group)
    return total


def _max_over(groups: Iterable[dist.ProcessGroup], norms: torch.Tensor, p: float) -> torch.Tensor:
    largest = norms.max()
    # A maximum between ranks may drop a NaN, so that one travels by a flag of its own.
    is_nan = largest.isnan()
    pair = torch.stack([largest.masked_fill(is_nan, 0.0), is_nan.to(largest.dtype)])
    for group in groups:
        with explained("the all-reduce of the gradients' norm", _RULE):
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return pair[0].masked_fill(pair[1] > 0, math.nan)


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors, in lists that foreach operations take at once."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    yield from alike.values()
