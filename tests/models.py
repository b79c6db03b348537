"""Small models whose shapes divide by nothing, and what the tests do with them on several ranks."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.selection import clean_name
from reference import ReferenceMuon


class Block(nn.Module):
    """A pre-norm transformer block with uneven widths."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, 5, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.q_small = nn.Linear(width, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        scores = self.q_small(h) @ self.k_proj(h).transpose(-1, -2)
        x = x + self.o_proj(scores.softmax(-1) @ self.v_proj(h) + self.q_proj(h))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class Transformer(nn.Module):
    """Two or three blocks, an embedding and a head."""

    def __init__(self, vocab: int = 11, width: int = 6, hidden: int = 13, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def is_proj(name: str, param: nn.Parameter) -> bool:
    """The predicate of the documentation: the projections of the blocks."""
    return "proj" in name and param.ndim == 2


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """Next-token loss on random tokens that `seed` determines."""
    tokens = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """(n,) is FSDP2 over n ranks, (r, s) is HSDP."""
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def dedicate(model: nn.Module, mesh: DeviceMesh, **kwargs: object) -> list:
    """`dedicate_params` on either kind of mesh, by the calls of the documentation."""
    if mesh.ndim == 1:
        return dmuon.dedicate_params(model, mesh["dp"], **kwargs)
    return dmuon.dedicate_params(model, mesh=mesh["shard"], replicate_mesh=mesh["replicate"], **kwargs)


def shard(model: nn.Module, mesh: DeviceMesh, **kwargs: object) -> None:
    """`fully_shard` of each block and of the root, as users do."""
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def build(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    predicate: object = is_proj,
    **muon: object,
) -> dmuon.Muon:
    """The three lines."""
    dedicate(model, mesh, predicate=predicate, reshard_after_forward=reshard_after_forward)
    shard(model, mesh, reshard_after_forward=reshard_after_forward)
    return dmuon.Muon(model, **muon)


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, whole, on every rank, by its name without those of wrappers."""
    return {clean_name(name): dmuon.full_tensor(p).detach().clone() for name, p in model.named_parameters()}


def assert_ranks_equal(weights: dict[str, torch.Tensor]) -> None:
    """Bitwise equality over all ranks."""
    sizes = [weight.nbytes for weight in weights.values()]
    low = torch.cat([weight.contiguous().view(-1).view(torch.uint8) for weight in weights.values()])
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    for name, least, most in zip(weights, low.split(sizes), high.split(sizes), strict=True):
        assert torch.equal(least, most), f"{name} differs between ranks"


def assert_weights_close(
    model: nn.Module, oracle: nn.Module, tolerance: float = 1e-5
) -> dict[str, torch.Tensor]:
    """Every weight equal to the oracle's and bitwise the same on all ranks; returns the whole weights."""
    weights = full_weights(model)
    for name, expected in oracle.named_parameters():
        difference = (weights[name] - expected).abs().max().item() if expected.numel() else 0.0
        assert difference <= tolerance, f"{name} is off by {difference}"
    assert_ranks_equal(weights)
    return weights


def mean_backward(
    oracle: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], seeds: list[int]
) -> None:
    """The oracle's gradient: the mean over all ranks' losses."""
    for seed in seeds:
        (loss(oracle, seed) / len(seeds)).backward()


def with_oracle(
    model: nn.Module, predicate: Callable = is_proj, **settings: object
) -> tuple[nn.Module, ReferenceMuon]:
    """A copy of the model, taken before it is sharded, and its optimizer."""
    oracle = copy.deepcopy(model)
    return oracle, ReferenceMuon(oracle, predicate, **settings)


def seeds_of(model: nn.Module, step: int) -> tuple[int, list[int]]:
    """This rank's number among the data-parallel ranks, and a seed for each of them."""
    layout = find_runtime(model).layout
    return layout.slot_of(layout.here), [1000 * step + rank for rank in range(layout.size)]


def backward_both(model: nn.Module, oracle: nn.Module, step: int, loss: Any = loss_of) -> None:
    """One backward of the model on this rank's data, and the oracle's on everybody's."""
    mine, seeds = seeds_of(model, step)
    loss(model, seeds[mine]).backward()
    mean_backward(oracle, loss, seeds)


def step_both(optimizer: dmuon.Muon, reference: ReferenceMuon) -> None:
    """An update of the model and of the oracle, whose gradients are forgotten."""
    optimizer.step()
    reference.step()
    optimizer.zero_grad()
    reference.zero_grad()


# Matrices whose gradients are given


class InnerProduct(nn.Module):
    """A matrix whose gradient is the module's input."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        whole = self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight
        return (whole * target).sum()


class InnerProducts(nn.Module):
    """One matrix per layer; the gradient of each is the target given for it. None leaves the layer out."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InnerProduct(weight) for weight in weights)

    def forward(self, targets: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.layers, targets, strict=True)
        return torch.stack([layer(target) for layer, target in pairs if target is not None]).sum()


def everything(name: str, param: nn.Parameter) -> bool:
    """The predicate that leaves nothing out."""
    return True


def agreed(
    ranks: Callable, shape: tuple[int, ...] | dict[str, int], fn: Callable, *args: object, **kwargs: object
) -> Any:
    """`fn(shape, ...)` on all ranks of a mesh; its one answer, bitwise the same on all of them."""
    sizes = shape.values() if isinstance(shape, dict) else shape
    answers = ranks(math.prod(sizes), fn, shape, *args, **kwargs)
    leaves = tree_leaves(answers[0])
    for rank, answer in enumerate(answers):
        for mine, theirs in zip(leaves, tree_leaves(answer), strict=True):
            same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
            assert same, f"rank 0 has {mine}, rank {rank} {theirs}"
    return answers[0]
