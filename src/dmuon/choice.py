"""The parameters that `dedicate_params` takes: the user's choice or the default, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .engine import fsdp
from .selection import (
    Candidate,
    Predicate,
    candidates,
    hidden_matrices,
    predicate_warning,
    small_share_warning,
    tied_parameters,
)

logger = logging.getLogger(__name__)


def chosen_parameters(model: nn.Module, predicate: Predicate | None) -> list[Candidate]:
    """The parameters to dedicate, in module order."""
    everything = candidates(model)
    if predicate is None:
        hidden = hidden_matrices(model)
        matched = [c for c in everything if id(c.param) in hidden]
        how = "the model has no 2-D weight of a hidden layer"
    else:
        matched = [c for c in everything if predicate(c.name, c.param)]
        how = "predicate matches no parameter"
    chosen = [c for c in matched if c.param.requires_grad]
    if not chosen:
        if matched:
            names = ", ".join(c.name for c in matched[:4])
            how = f"every parameter chosen is frozen ({names}{', ...' if len(matched) > 4 else ''})"
        there = [c.name for c in everything if c.param.ndim == 2][:4]
        raise ValueError(
            f"nothing to dedicate: {how}. Pass predicate=lambda name, param: ... that chooses matrices; the "
            f"model has, for instance, {', '.join(there) or 'no matrix at all'}."
        )
    return chosen


def check_choice(model: nn.Module, chosen: Sequence[Candidate]) -> None:
    """Refuse what cannot be dedicated, by name."""
    managed, tied = fsdp.managed_parameters(model), tied_parameters(model)
    for name, param in ((candidate.name, candidate.param) for candidate in chosen):
        if id(param) in managed:
            raise ValueError(
                f"{name} has already been taken by fully_shard. The order is: dmuon.dedicate_params, then "
                "fully_shard, then dmuon.Muon."
            )
        if id(param) in tied:
            raise ValueError(f"{name} is tied to another parameter; leave it to AdamW (choose by predicate)")
        if param.ndim < 2:
            shape = tuple(param.shape)
            raise ValueError(f"{name} has shape {shape}; only matrices, and stacks of them, can be dedicated")
        if is_traceable_wrapper_subclass(
            mine := param._local_tensor if isinstance(param, DTensor) else param
        ):
            raise ValueError(
                f"{name} is a {type(mine).__name__}, a tensor class of its own (such as torchao's quantized "
                "weights), which would be lost when it is dedicated. Leave it out by predicate, or convert "
                "no matrix that Muon is to train."
            )
        if not param.is_floating_point():
            raise ValueError(f"{name} has dtype {param.dtype}; only floating-point matrices can be dedicated")


def warn_of_choice(model: nn.Module, chosen: Sequence[Candidate], *, by_predicate: bool) -> None:
    """Log where Muon gets little, and where a predicate takes embeddings or heads."""
    for text in (
        small_share_warning(model, chosen),
        predicate_warning(model, chosen) if by_predicate else None,
    ):
        if text is not None:
            logger.warning("%s", text)
