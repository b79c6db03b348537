"""Gradient accumulation without communication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from .engine import fsdp
from .engine.ddp import ddp_around
from .engine.runtime import find_runtime


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside leave their gradients where they arise; the first one outside reduces them as well.

        for batch in micro_batches[:-1]:
            with dmuon.no_sync(model):
                loss(model, batch).backward()
        loss(model, micro_batches[-1]).backward()

    For dedicated and base parameters alike, under FSDP2, HSDP and DDP (ours and torch's; then `model` is the
    wrapped one, and forwards belong inside too). It saves the reductions of those backwards, and costs the
    memory of whole gradients in between; the update is the same. Contexts may be nested: communication comes
    back at the end of the outermost one, unless FSDP2's `set_requires_gradient_sync(False)` was in force
    before. Call it on all ranks.

    Raises:
        ValueError: if the model has no dedicated parameters.
    """
    runtime = find_runtime(model)
    wrapper = ddp_around(model, runtime.model)
    with fsdp.no_sync(model), wrapper.no_sync() if wrapper is not None else contextlib.nullcontext():
        runtime.no_sync_depth += 1
        try:
            yield
        finally:
            runtime.no_sync_depth -= 1
