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


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear", "dot"}


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

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """What this rank keeps: on the owner all rows (or those of its piece), none elsewhere."""
        local = super().to_local(grad_placements=grad_placements)
        param = self.record()
        if torch.is_grad_enabled() or param is None or param.resting is not self:
            return local
        rows = local.as_subclass(LocalRows)
        rows.record = self.record
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        owned = [value for value in flat if isinstance(value, OwnedTensor)]
        name = func._schema.name.removeprefix("aten::")
        in_place = name.endswith("_")
        if name in _PRODUCTS:
            _check_product(owned, name)
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
        if func is torch.ops.aten.linalg_vector_norm.default and _param_of(owned[0]).has_plain_neighbours:
            return result.full_tensor()  # torch's clip_grad_norm_ stacks it with plain norms

        def wrap(value: Any) -> Any:
            if type(value) is DTensor:
                for other in owned:
                    if value.shape == other.shape and value.placements == other.placements:
                        return OwnedTensor.of(value, other.record)
            return value

        return tree_map(wrap, result)


class LocalRows(torch.Tensor):
    """This rank's rows of a weight at rest; it puts even chunks of the weight aside for `load_state_dict`.

    torch's `set_model_state_dict(broadcast_from_rank0=True)` takes a weight for evenly cut: it copies each
    rank's chunk into what `to_local` gives, and then loads "the weight itself".
    """

    record: weakref.ref[DedicatedParam]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        param = args[0].record() if func is torch.Tensor.copy_ and type(args[0]) is cls else None
        if param is not None and args[1].shape == param.even_shape:
            param.even_chunk = args[1].detach().clone()
            if args[1].shape != args[0].shape:
                return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


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


def _check_product(owned: list[OwnedTensor], name: str) -> None:
    """Refuse products of matrices: torch would take the parts for even chunks.

    Raises:
        RuntimeError: by the parameter's name, on every rank, but where each has the whole.
    """
    for tensor in owned:
        param = _param_of(tensor)
        if param.layout.shard_size > 1 or param.is_cut or tensor.placements != param.weight_placements:
            raise _misfit(param, name)


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
