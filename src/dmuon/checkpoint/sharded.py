"""Dedicated weights shown as FSDP2 would have them, for code that writes to the parameters it finds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod

import torch.nn as nn

from ..engine.parameter import DedicatedParam
from ..engine.runtime import find_runtime
from .hooks import load_weight, stock_weight


@contextlib.contextmanager
def as_sharded(model: nn.Module) -> Iterator[None]:
    """Show dedicated weights as `fully_shard` would have cut them, and take over what is written to them.

    Inside, each is a parameter whose DTensor has even chunks of rows (placements `Shard(0)`, with those of
    HSDP and tensor parallelism), or a plain whole one under DDP; base parameters are as always. They may be
    changed in place, or replaced. It is for code that initialises or merges weights by
    operations that know FSDP2's DTensors. On exit the owners take the values over; with replicas, the owner's
    counts. If the code inside raises, the weights stay as they were.

    Collective over all ranks of the model, on entry and on exit. Takes the memory of this rank's shares.
    There is no forward and no state dict of the model inside. Where tensor parallelism and FSDP2 both cut the
    rows and do not divide them, a weight is shown whole.

    Args:
        model: after `dedicate_params`, not on the meta device; before `Muon` or after it.

    Raises:
        TypeError, ValueError: as `dmuon.Muon`, for a model without dedicated parameters.
        RuntimeError: for weights on the meta device; on exit, on all ranks, where a weight is gone or has
            another shape.
    """
    params = find_runtime(model).params
    for param in params:
        if param.resting.is_meta:
            raise RuntimeError(
                f"{param.param_name} is on the meta device: call model.to_empty(device=...) before "
                "dmuon.as_sharded"
            )
    with evenly_sharded(params):
        yield
        for param in params:
            value = param.module._parameters.get(param.attribute)
            if value is None or value.shape != param.full_shape or value.is_meta:
                raise RuntimeError(
                    f"{param.param_name} is gone, on the meta device or of another shape than "
                    f"{tuple(param.full_shape)} at the end of dmuon.as_sharded: change values, not shapes"
                )
        for param in params:
            value = param.module._parameters[param.attribute]
            if value is not None and value is not param.resting:  # a state dict was loaded into that
                load_weight(param, value.detach())
                param.published = None  # replicas may have been written to differently


@contextlib.contextmanager
def evenly_sharded(params: Sequence[DedicatedParam]) -> Iterator[None]:
    """Let modules show copies in the state dict's layout until something is loaded into them, for code that
    writes to the parameters it finds; collective over all ranks. It takes the memory of this rank's share.
    """
    try:
        for param in params:
            stand_in = stock_weight(param) if _torch_can_cut(param) else param.full_tensor().detach()
            param.module._parameters[param.attribute] = nn.Parameter(stand_in, param.resting.requires_grad)
        yield
    finally:
        for param in params:
            param.show_resting()


def _torch_can_cut(param: DedicatedParam) -> bool:
    """Whether torch finds the right rows: not where two mesh dims cut them and do not divide them."""
    if param.tp is None or param.resting.is_meta:
        return True
    cuts = [param.tp.mesh.shape[dim] for dim in param.tp.cutting if param.tp.placements[dim].is_shard(0)]
    return not cuts or param.full_shape[0] % (prod(cuts) * param.layout.shard_size) == 0
