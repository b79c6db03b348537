"""A DTensor whose rows all lie with their owner, and how torch's operations are led around it.

torch is right on such a tensor where an operation works element by element or sums up, and wrong where it
takes local parts for even chunks: in `full_tensor` and `redistribute`, in means, in operations that mix it
with tensors that lie otherwise, such as the gradient that flows into `weight.square().sum()`, and in all
others. Those are given the whole, on every rank (`weight.max()`, `weight.var()`); what cannot be right so,
because it writes or is a view, is refused by name.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from .parameter import DedicatedParam


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear", "dot"}
_ON_PARTS = {
    "alias",
    "clone",
    "copy_",
    "detach",
    "equal",
    "fill_",
    "lift_fresh",
    "masked_fill_",
    "where",
    "zero_",
}
_ON_PARTS |= {"_to_copy", "_pin_memory", "is_pinned", "record_stream", "set_"}
_ELSEWHERE = "with a tensor that lies elsewhere"
_LISTS = ("_foreach", "_amp_foreach", "_fused")


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
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_LISTS):
            _check_lists(args, name)
            if name == "_foreach_norm" and not 0 < (args[1] if len(args) > 1 else 2) < math.inf:
                return [torch.linalg.vector_norm(each, args[1]) for each in args[0]]
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, list) and args[0]:
                return [_owned_like([before], after) for before, after in zip(args[0], result, strict=True)]
            return result
        flat, spec = tree_flatten((args, kwargs or {}))
        owned = [value for value in flat if isinstance(value, OwnedTensor)]
        first, in_place = owned[0], name.endswith("_")
        if any(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) and v.numel() > 1 for v in flat):
            raise _refusal(_param_of(first), name, "with a plain tensor")
        placements = _common_placements(owned)
        on_parts = _works_on_parts(func, name, args, kwargs or {})
        if not on_parts or not _lie_together(owned, placements) or not _broadcast_to(first.shape, flat):
            if not (func.is_view or func._schema.is_mutable or name in _PRODUCTS):
                return _on_whole(func, flat, spec)
            if not all(map(_is_everywhere, owned)):
                raise _refusal(_param_of(first), name, _ELSEWHERE if on_parts else "of its rows")
        else:
            _fit(flat, first, placements, name)
        adds = in_place and any(isinstance(v, DTensor) and v.numel() > 1 for v in flat if v is not first)
        if adds and hasattr(first, "_dmuon_count"):  # but for those that are scaled, or set to nothing
            first._dmuon_count = None  # a gradient to which something is added is one, whoever had one before
        args, kwargs = tree_unflatten(flat, spec)
        if func is torch.ops.aten.mean.default:  # torch's is the mean of the local means
            return (
                super().__torch_dispatch__(torch.ops.aten.sum.default, types, args, kwargs) / owned[0].numel()
            )
        # For a view, torch up to 2.9 at least wants to see the class of what it gives.
        with _as_torchs(owned) if func.is_view else contextlib.nullcontext():
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if in_place:
            return None if result is None else flat[0]
        if func is torch.ops.aten.linalg_vector_norm.default and _param_of(owned[0]).has_plain_neighbours:
            return result.full_tensor()  # torch's clip_grad_norm_ stacks it with plain norms
        return tree_map(partial(_owned_like, owned), result)


@contextlib.contextmanager
def _as_torchs(owned: Sequence[OwnedTensor]) -> Iterator[None]:
    """Some of ours as plain DTensors, meanwhile."""
    for tensor in owned:
        tensor.__class__ = DTensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensor in owned:
            tensor.__class__ = OwnedTensor


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


def _works_on_parts(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the operation does on this rank's rows what it would do on the whole."""
    if name in ("sum", "mean"):
        return func._overloadname == "default"
    if name == "linalg_vector_norm":  # the maximum of no rows is none
        named = dict(zip(("self", "ord", "dim"), args, strict=False)) | kwargs
        return not named.get("dim") and 0 < named.get("ord", 2) < math.inf
    if name in ("view", "_unsafe_view", "expand"):
        return tuple(args[1]) == args[0].shape
    return _is_elementwise(func, name)


@cache
def _is_elementwise(func: Any, name: str) -> bool:
    tags = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
    return (
        name in _ON_PARTS
        or name.startswith("new_")
        or name.endswith("_like")
        or not tags.isdisjoint(func.tags)
    )


def _is_everywhere(tensor: OwnedTensor) -> bool:
    """Whether every rank has the whole, so that torch is right on its parts."""
    param = _param_of(tensor)
    return param.layout.shard_size == 1 and not param.is_cut and tensor.placements == param.weight_placements


def _common_placements(owned: Sequence[OwnedTensor]) -> tuple[Placement, ...]:
    """Those that tensors of one operation are brought to: theirs, or where the gradients lie."""
    first = owned[0]
    alike = all(value.placements == first.placements for value in owned)
    return first.placements if alike else _param_of(first).owner_placements


def _lie_together(tensors: Sequence[OwnedTensor], placements: tuple[Placement, ...]) -> bool:
    """Whether their rows are on the same ranks, once they have these placements."""
    keepers = set()
    for tensor in tensors:
        param = _param_of(tensor)
        at_owner = (param.coordinate, None if param.has_team else param.tp_owner)
        keepers.add(param.coordinate.shard if placements == param.weight_placements else at_owner)
    return len(keepers) == 1 and len({tensor.shape for tensor in tensors}) == 1


def _owned_like(sources: Sequence[Any], result: Any) -> Any:
    """What an operation on `sources` has given, as one of ours if it lies as one of them."""
    if type(result) is DTensor:
        for source in sources:
            alike = isinstance(source, OwnedTensor) and result.shape == source.shape
            if alike and result.placements == source.placements:
                return OwnedTensor.of(result, source.record)
    return result


def _broadcast_to(shape: torch.Size, flat: Sequence[Any]) -> bool:
    """Whether the result of an operation, element by element, has this shape."""
    shapes = [value.shape for value in flat if isinstance(value, DTensor)]
    if all(other == shape or other.numel() == 1 for other in shapes):
        return True
    try:
        return torch.broadcast_shapes(*shapes) == shape
    except RuntimeError:
        return False


@torch.no_grad()
def _on_whole(func: Any, flat: Sequence[Any], spec: Any) -> Any:
    """The operation on whole tensors, on every rank; what it gives is replicated. Collective."""
    mesh = next(_param_of(value).mesh for value in flat if isinstance(value, OwnedTensor))
    args, kwargs = tree_unflatten([v.full_tensor() if isinstance(v, DTensor) else v for v in flat], spec)

    def replicated(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return tree_map(replicated, func(*args, **kwargs))


def _fit(flat: list[Any], first: OwnedTensor, placements: tuple[Placement, ...], name: str) -> None:
    """Bring all tensors of one operation that have the rows of ours to where it is done; in place.

    Raises:
        RuntimeError: by the parameter's name, on every rank, for what lies otherwise than torch and we do.
    """
    param, is_even = _param_of(first), _param_of(first).layout.shard_size == 1
    for index, value in enumerate(flat):
        if not isinstance(value, DTensor) or value.numel() == 1 < first.numel():
            continue
        mesh, elsewhere = value.device_mesh, value.placements != placements
        if elsewhere and index == 0 and name.endswith("_"):
            raise _refusal(param, name, _ELSEWHERE)
        if isinstance(value, OwnedTensor):
            if elsewhere:
                flat[index] = _param_of(value).to_owner(value)
        elif mesh == param.mesh and all(
            place.is_replicate() or place.is_partial() or mesh.size(dim) == 1
            for dim, place in enumerate(value.placements)
        ):
            whole = value.redistribute(placements=[Replicate()] * mesh.ndim)._local_tensor
            flat[index] = param.from_whole(whole.expand(first.shape), placements)
        elif elsewhere or not is_even:
            raise _refusal(
                param, name, _ELSEWHERE
            )  # in even chunks, which one rank in a row alone has as we do


def _check_lists(args: tuple, name: str) -> None:
    """In an operation on lists, what stands at one place of each has to lie together: torch would move it.

    Raises:
        RuntimeError: as `_fit`.
    """
    lists = [each for each in args if isinstance(each, (list, tuple)) and each]
    for together in zip(*lists, strict=False):
        owned = [value for value in together if isinstance(value, OwnedTensor)]
        if not owned:
            continue
        placements = owned[0].placements
        alike = [value for value in together if isinstance(value, DTensor) and value.shape == owned[0].shape]
        fit = len(alike) == len(owned) or _param_of(owned[0]).layout.shard_size == 1
        if not (fit and all(v.placements == placements for v in alike) and _lie_together(owned, placements)):
            raise _refusal(_param_of(owned[0]), name, _ELSEWHERE)


def _refusal(param: DedicatedParam, name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"{param.param_name} is a dedicated parameter, whole on its owner: {name} {why} is not to be had. "
        "Compute with dmuon.full_tensor(param), or in the forward of a module that fully_shard wraps; train "
        "it with dmuon.Muon, no other optimizer; write values that lie as it does (torch.zeros_like(param), "
        "param.clone()), and load whole ones with load_state_dict."
    )


def _param_of(tensor: OwnedTensor) -> DedicatedParam:
    param = tensor.record()
    if param is None:
        raise RuntimeError("the model that this dedicated parameter belonged to is gone")
    return param
