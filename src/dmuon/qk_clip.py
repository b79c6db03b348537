"""QK-clip: keep attention logits small by the weights that make them (MuonClip; Kimi K2, arXiv:2507.20534).

After a step, each head h whose largest logit S_h of the batch was above a threshold t gets a factor
gamma_h = t / S_h: queries and keys by its square root each, so that their product is down to t. Where several
heads share a key (grouped queries, the rotary part of latent attention) the key stays as it is, and the
queries take all of gamma_h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from .clip import groups_of
from .engine.agreement import ranks_of
from .engine.layout import local_slices
from .engine.parameter import DedicatedParam, local_part
from .engine.runtime import find_runtime
from .selection import clean_name


@dataclass(frozen=True)
class AttentionHeads:
    """One attention layer: its logits, and the rows of weights [out, in] that make queries and keys.

    Rows are counted in the whole parameter, whatever cuts it; queries and keys may be rows of one.

    Attributes:
        logits: [heads], the largest logit of each head on this rank since the last call, after scaling by
            1 / sqrt(head size). Under tensor parallelism either of all heads, or of this rank's part of them
            (heads are then cut evenly, in order).
        query: name of the parameter with the queries' rows.
        key: likewise of the keys'.
        query_rows: [heads, size], of queries that meet a key of their head's own; None: there are none.
        key_rows: [heads, size], of those keys.
        shared_query_rows: [heads, size], of queries whose keys several heads share.
    """

    logits: torch.Tensor
    query: str
    key: str
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    shared_query_rows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        query: str,
        key: str,
        *,
        heads: int,
        key_heads: int | None = None,
        size: int,
        query_start: int = 0,
        key_start: int = 0,
        stride: int | None = None,
    ) -> AttentionHeads:
        """Of heads of one size, in order.

        Args:
            logits: as the attribute.
            query: as the attribute.
            key: as the attribute.
            heads: of queries.
            key_heads: fewer than `heads` for grouped queries; by default as many.
            size: rows of a head.
            query_start: the first row of the first head's queries; not 0 in some fused projections.
            key_start: likewise of its keys.
            stride: from the first row of a head to that of the next; by default `size`. 3 `size` where
                queries, keys and values of one head follow each other.
        """
        start = (stride or size) * torch.arange(heads)[:, None] + torch.arange(size)
        if key_heads not in (None, heads):
            return cls(logits, query, key, shared_query_rows=query_start + start)
        return cls(logits, query, key, query_start + start, key_start + start)

    @classmethod
    def latent(
        cls,
        logits: torch.Tensor,
        query: str,
        key: str,
        *,
        heads: int,
        nope: int,
        rope: int,
        value: int,
    ) -> AttentionHeads:
        """Of multi-head latent attention, as DeepSeek-V3 and Kimi K2 have it: a head's key is one part of its
        own, and a rotary part that all heads share, which stays as it is.

        Args:
            logits: as the attribute.
            query: with the queries' rows, such as `q_b_proj`: of each head the `nope` ones, then the `rope`
                ones.
            key: with the keys' rows, such as `kv_b_proj`: of each head the `nope` ones, then its values'.
            heads: how many there are.
            nope: size of the part without positions (`qk_nope_head_dim`).
            rope: size of the rotary part (`qk_rope_head_dim`).
            value: size of a value (`v_head_dim`).
        """
        head = torch.arange(heads)[:, None]
        own = (nope + rope) * head + torch.arange(nope)
        shared = (nope + rope) * head + nope + torch.arange(rope)
        return cls(logits, query, key, own, (nope + value) * head + torch.arange(nope), shared)


@torch.no_grad()
def qk_clip_(model: nn.Module, layers: Sequence[AttentionHeads], threshold: float = 100.0) -> torch.Tensor:
    """Scale queries and keys of heads whose logits were too large, in place; after `optimizer.step()`.

    All ranks that share the model call it, with the same layers in the same order. One collective for each
    dim of the mesh brings the maxima together, whatever the number of layers; the host does not wait for the
    device. Weights may be dedicated or FSDP2's, whole or cut. An update that is on its way is waited for.

    Args:
        model: with dedicated parameters.
        layers: the attention layers to look at.
        threshold: largest logit allowed, > 0.

    Returns:
        [layers, most heads]: the largest logit of each head over all ranks; -inf where a layer has fewer.

    Raises:
        ValueError: for a threshold that is not positive, an unknown name, logits that do not fit the rows, or
            rows that the parameter does not have.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be > 0, got {threshold}")
    runtime = find_runtime(model)
    named = {clean_name(name): param for name, param in model.named_parameters()}
    for layer in layers:
        _check(layer, named)
    if not layers:
        return torch.zeros(0, 0, device=runtime.layout.device)
    runtime.synchronize()
    maxima = torch.full((len(layers), max(map(_heads, layers))), -torch.inf, device=runtime.layout.device)
    for row, layer in zip(maxima, layers, strict=True):
        first = _position(layer, runtime.record_of(named[layer.query])) * layer.logits.numel()
        row[first : first + layer.logits.numel()] = layer.logits.to(row)
    for group in groups_of(ranks_of(runtime.params)):
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    for row, layer in zip(maxima, layers, strict=True):
        # Not where a logit is NaN: the loss shows that soon enough, and the weights stay readable.
        gamma = torch.where(row > threshold, threshold / row, 1.0)[: _heads(layer)]
        factors: dict[str, torch.Tensor] = {}
        for name, rows, factor in (
            (layer.query, layer.query_rows, gamma.sqrt()),
            (layer.key, layer.key_rows, gamma.sqrt()),
            (layer.query, layer.shared_query_rows, gamma),
        ):
            if rows is not None:
                if name not in factors:
                    factors[name] = torch.ones(named[name].shape[0], device=gamma.device)
                factors[name][rows.to(gamma.device)] *= factor[:, None]
        for name, of_rows in factors.items():
            _scale(named[name], runtime.record_of(named[name]), of_rows)
    return maxima


def _heads(layer: AttentionHeads) -> int:
    rows = layer.query_rows if layer.query_rows is not None else layer.shared_query_rows
    assert rows is not None
    return len(rows)


def _position(layer: AttentionHeads, query: DedicatedParam | None) -> int:
    """Which part of the heads this rank's logits are of."""
    parts = _heads(layer) // layer.logits.numel()
    if parts == 1:
        return 0
    if query is None or query.tp is None or query.tp.size != parts:
        raise ValueError(
            f"qk_clip_: the logits of {layer.query} are of one head in {parts}, but tensor parallelism does "
            f"not cut it into {parts} pieces. Give those of all {_heads(layer)} heads."
        )
    return query.tp.position


def _check(layer: AttentionHeads, named: dict[str, nn.Parameter]) -> None:
    for name in (layer.query, layer.key):
        if name not in named:
            raise ValueError(f"qk_clip_: the model has no parameter {name!r}")
    if layer.query_rows is None and layer.shared_query_rows is None:
        raise ValueError(f"qk_clip_: no rows of {layer.query} are given")
    heads = _heads(layer)
    if layer.logits.ndim != 1 or layer.logits.numel() == 0 or heads % layer.logits.numel():
        shape = tuple(layer.logits.shape)
        raise ValueError(
            f"qk_clip_: the logits of {layer.query} have shape {shape}, not ({heads},) or a part"
        )
    of_query, of_key = named[layer.query].shape[0], named[layer.key].shape[0]
    for name, rows, count in (
        (layer.query, layer.query_rows, of_query),
        (layer.key, layer.key_rows, of_key),
        (layer.query, layer.shared_query_rows, of_query),
    ):
        if rows is not None and not (len(rows) == heads and 0 <= int(rows.min()) <= int(rows.max()) < count):
            raise ValueError(f"qk_clip_: {name} has {count} rows, and not those given for {heads} heads")


def _scale(weight: nn.Parameter, param: DedicatedParam | None, factors: torch.Tensor) -> None:
    """Multiply each row of a parameter, where it lies.

    factors: [rows of the whole parameter], the same on all ranks.
    """
    local, rows = local_part(weight), factors
    if param is not None and param.tp is not None:
        rows = factors[param.tp.pieces[param.tp.position][0]]
    elif param is None and isinstance(weight, DTensor):
        if any(isinstance(placement, _StridedShard) for placement in weight.placements):
            raise ValueError(
                "qk_clip_: rows that tensor parallelism and fully_shard both cut must be dedicated"
            )
        rows = factors[local_slices(weight.shape, weight.device_mesh, weight.placements)[0]]
    if param is None or param.keeps_weight:
        local.mul_(rows.to(local.dtype).view(-1, *[1] * (local.ndim - 1)))
    if param is not None:
        param.mark_updated()
        param.published = param.version  # all who keep it have done the same
