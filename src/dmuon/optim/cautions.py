"""Warnings when an optimizer is built: of what works, and is coarse or slow."""

from __future__ import annotations

import logging

import torch

from ..engine.runtime import Runtime

logger = logging.getLogger(__name__)

_EXACT_CHAIN = 64  # ranks: a sum of bfloat16 in a chain is off by about 1 % then, by 3 % at 512
_LONG_ROW = 128  # ranks


def warn_of_rounding(runtime: Runtime) -> None:
    """Log where weights are kept in a dtype in which small updates are lost."""
    coarse = [p for p in runtime.params if torch.finfo(p.resting.dtype).bits < 32]
    if coarse:
        logger.warning(
            "%d dedicated parameters (%s, ...) are kept in %s: updates much smaller than the weights are "
            "lost in rounding. Pass master_dtype=torch.float32 to dedicate_params, or keep the model in "
            "float32 and give fully_shard a MixedPrecisionPolicy.",
            len(coarse),
            coarse[0].param_name,
            coarse[0].resting.dtype,
        )


def warn_of_long_rows(runtime: Runtime) -> None:
    """Log where many ranks stand in one chain; the groups exist."""
    layout, groups = runtime.layout, runtime.groups
    longest = max(layout.shard_size, layout.replicate_size)
    coarse = [g for g in groups if torch.finfo(g.precision.reduce_dtype(g.params[0])).bits < 32]
    if coarse and longest > _EXACT_CHAIN:
        logger.warning(
            "gradients are reduced in %s over %d ranks in a chain, each of which rounds. Give "
            "fully_shard a MixedPrecisionPolicy with reduce_dtype=torch.float32, or dedicate_params an "
            "mp_policy of its own.",
            coarse[0].precision.reduce_dtype(coarse[0].params[0]),
            longest,
        )
    if layout.shard_size > _LONG_ROW:
        logger.warning(
            "a row has %d ranks: weights and gradients pass through all of them in a chain, which takes "
            "long for small matrices. Use HSDP with rows of at most %d: a (replicate, shard) mesh.",
            layout.shard_size,
            _LONG_ROW,
        )
