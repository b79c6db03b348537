"""A DTensor whose rows all lie with their owner, and how torch's operations are led around it.

torch is right on such a tensor where an operation works element by element or sums up, and wrong where it
takes local parts for even chunks: in `full_tensor` and `redistribute`, in means, and in operations that mix
it with tensors that lie otherwise, such as the gradient that flows into `weight.square().sum()`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from .parameter import DedicatedParam


class OwnedTensor(DTensor):
    """A dedicated parameter at rest, its gradient, its momentum, and what is computed from them.

    It lies as the weight does (`DedicatedParam.weight_placements`: with all who keep it) or as the gradient
    does (`owner_placements`: with the one owner). In an operation on several, all are brought to where the
    gradient lies; what torch holds whole on every rank is cut to fit.

    Attributes:
        record: the parameter that it belongs to, weakly.
    """

    record: weakref.ref[DedicatedParam]

    @classmethod
    def of(cls, tensor: DTensor, record: weakref.ref[DedicatedParam]) -> OwnedTensor:
        """`tensor` itself, which lies with its owner, as one of ours."""
        tensor.__class__ = cls  # the constructor of DTensor has no place for a class
        tensor.record = record  # type: ignore[attr-defined]
        return tensor  # type: ignore[return-value]

    def full_tensor(self, *, grad_placements: object = None) -> torch.Tensor:
        """The whole, on every rank, which all call it. A gradient of it is to be the same on all ranks."""
        return _param_of(self).whole_of(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        owned = [value for value in flat if isinstance(value, OwnedTensor)]
        name = func._schema.name.removeprefix("aten::")
        in_place = name.endswith("_")
        if not name.startswith(("_foreach", "_amp_foreach")):
            _fit(flat, owned, name, in_place)
        args, kwargs = tree_unflatten(flat, spec)
        if func is torch.ops.aten.mean.default:  # torch's is the mean of the local means
            return (
                super().__torch_dispatch__(torch.ops.aten.sum.default, types, args, kwargs) / owned[0].numel()
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if in_place:
            return None if result is None else flat[0]

        def wrap(value: Any) -> Any:
            if type(value) is DTensor:
                for other in owned:
                    if value.shape == other.shape and value.placements == other.placements:
                        return OwnedTensor.of(value, other.record)
            return value

        return tree_map(wrap, result)


def _fit(flat: list[Any], owned: list[OwnedTensor], name: str, in_place: bool) -> None:
    """Bring all tensors of one operation that have the shape of the first of ours to where it lies; in place.

    Raises:
        RuntimeError: by the parameter's name, on every rank, for what lies otherwise than torch and we do.
    """
    first = owned[0]
    param = _param_of(first)
    alike = [value for value in flat if isinstance(value, DTensor) and value.shape == first.shape]
    if len(alike) < 2:
        return
    placements: tuple[Placement, ...] = first.placements
    if any(value.placements != placements for value in owned if value.shape == first.shape):
        placements = param.owner_placements
    if in_place and flat[0] is not None and isinstance(flat[0], DTensor) and flat[0].placements != placements:
        raise _misfit(param, name)
    for index, value in enumerate(flat):
        if not isinstance(value, DTensor) or value.shape != first.shape:
            continue
        if isinstance(value, OwnedTensor):
            if value.placements != placements:
                flat[index] = param.to_owner(value)
        elif all(p.is_replicate() or p.is_partial() for p in value.placements):
            if value.device_mesh != param.mesh:
                raise _misfit(param, name)
            whole = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)._local_tensor
            flat[index] = param.from_whole(whole, placements)
        elif value.placements != placements or param.layout.shard_size > 1:
            raise _misfit(param, name)  # cut into even chunks, which one rank in a row alone has as we do
    if in_place and hasattr(first, "_dmuon_count"):
        first._dmuon_count = None  # a gradient to which something is added is one, whoever had one before


def _misfit(param: DedicatedParam, name: str) -> RuntimeError:
    return RuntimeError(
        f"{param.param_name} is a dedicated parameter, whole on its owner: {name} with a tensor that lies "
        "elsewhere is not to be had. Work with dmuon.full_tensor(param), or with param.norm() and operations "
        "on param, param.grad and numbers alone; change weights by values that lie as param does "
        "(torch.zeros_like(param), param.clone())."
    )


def _param_of(tensor: OwnedTensor) -> DedicatedParam:
    param = tensor.record()
    if param is None:
        raise RuntimeError("the model that this dedicated parameter belonged to is gone")
    return param
