"""Two lines that say which parameters live where."""

from __future__ import annotations

import re
from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import dmuon

MOST_ROWS = 8  # more owner rows than these are counted, not listed


def where_it_lives(model: nn.Module, optimizer: str) -> str:
    """A line for Muon's owners (optimizer "dmuon" only), and one for AdamW's parameters."""
    if optimizer != "dmuon":
        params = list(model.parameters())
        return f"AdamW has all {len(params)} parameters, {spread_of(params)}"
    dedicated = {param.param_name for param in dmuon.get_dedicated_params(model)}
    base = {name: param for name, param in model.named_parameters() if name not in dedicated}
    return (
        f"Muon has {len(dedicated)} matrices: {owners(model)}\n"
        f"AdamW has {', '.join(templates(list(base)))}, {spread_of(list(base.values()))}"
    )


def owners(model: nn.Module) -> str:
    """Per owner row, the ranks that keep a matrix together: its ranks, its matrices, its TP owners."""
    everything = Counter(layer_of(param.param_name) for param in dmuon.get_dedicated_params(model))
    rows: dict[tuple[str, ...], list[int]] = {}  # names of the matrices -> ranks
    for rank in range(dist.get_world_size()):
        names = tuple(param.param_name for param in dmuon.get_owned_params(model, rank))
        if names:
            rows.setdefault(names, []).append(rank)
    tp_owners = {p.param_name: p.owner_rank for p in dmuon.get_dedicated_params(model) if p.tp_group}

    texts = []
    for names, ranks in rows.items():
        layers = Counter(map(layer_of, names))
        parts = [layer if n == everything[layer] else f"{n} of {layer}" for layer, n in layers.items()]
        text = f"{ranks_text(ranks)} {', '.join(parts)}"
        counts = sorted(Counter(tp_owners[name] for name in names if name in tp_owners).items())
        if counts:
            text += f" (TP owners: {', '.join(f'rank {rank} of {count}' for rank, count in counts)})"
        texts.append(text)
    hidden = len(texts) - MOST_ROWS
    return "; ".join(texts[:MOST_ROWS] + ([f"and {hidden} more"] if hidden > 0 else []))


def ranks_text(ranks: list[int]) -> str:
    return f"rank {ranks[0]} owns" if len(ranks) == 1 else f"ranks {'+'.join(map(str, ranks))} own"


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up_proj.weight`: all up to the first number; without one, the name."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name


def templates(names: list[str]) -> list[str]:
    """The names without `.weight`, `*` for each number, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight")) for name in names))


def spread_of(params: list[nn.Parameter]) -> str:
    """Over which mesh dims the parameters are cut."""
    dims: dict[str, None] = {}
    for param in params:
        if isinstance(param.data, DTensor):
            mesh = param.data.device_mesh
            for name, size, placement in zip(
                mesh.mesh_dim_names or (), mesh.shape, param.data.placements, strict=True
            ):
                if size > 1 and not isinstance(placement, Replicate):
                    dims[name] = None
    return f"in shards over {' and '.join(dims)}" if dims else "whole on every rank"
