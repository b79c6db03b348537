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
from torch.utils._pytree import tree_leaves

import dmuon
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
    """The predicate of the document: the projections of the blocks."""
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
    """Every parameter, whole, on every rank."""
    return {name: dmuon.full_tensor(p).detach().clone() for name, p in model.named_parameters()}


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


# Matrices whose gradients are given


class InnerProduct(nn.Module):
    """A matrix whose gradient is the module's input."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return (self.weight * target).sum()


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


def kept_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value, on every rank, of a momentum or a gradient: exactly one rank has it, whole."""
    local = tensor.to_local()
    keepers = torch.tensor(float(local.numel() > 0))
    dist.all_reduce(keepers)
    assert keepers == 1, f"{int(keepers)} ranks keep a part of it"
    whole = torch.zeros(tensor.shape, dtype=local.dtype)
    if local.numel():
        assert local.shape == tensor.shape
        whole.copy_(local)
    dist.all_reduce(whole)
    return whole


def momentum_of(optimizer: dmuon.Muon, param: torch.Tensor) -> torch.Tensor:
    """The whole momentum of a dedicated parameter, on every rank."""
    return kept_by_one(optimizer.state[param]["momentum_buffer"])


Targets = list[list[list[torch.Tensor | None]]]  # by step, rank and weight


def train_on_targets(
    shape: tuple[int, ...],
    weights: list[torch.Tensor],
    targets: Targets,
    *,
    reshard: bool = True,
    one_group: bool = False,
    **muon: object,
) -> list[list[dict[str, torch.Tensor | None]]]:
    """What each step left, by step and weight: the whole "weight", "momentum" and "gradient" (None: none).

    `one_group` lets all weights share one hook boundary; otherwise each has its own.
    """
    model = InnerProducts(weights)
    mesh = make_mesh(shape)
    dedicate(model, mesh, predicate=everything, reshard_after_forward=reshard)
    if one_group:
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    else:
        shard(model, mesh, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, **muon)
    history = []
    for by_rank in targets:
        model(by_rank[dist.get_rank()]).backward()
        params = list(model.parameters())
        gradients = [None if p.grad is None else kept_by_one(p.grad) for p in params]
        optimizer.step()
        optimizer.zero_grad()
        for record in dmuon.get_dedicated_params(model):  # the owner, and under HSDP its replicas
            if record.keeps_weight:
                assert torch.equal(record.local, record.full_tensor()), f"{record} is another on a replica"
            else:
                record.full_tensor()  # collective
        history.append(
            [
                {
                    "weight": dmuon.full_tensor(param).detach().clone(),
                    "momentum": momentum_of(optimizer, param) if param in optimizer.state else None,
                    "gradient": gradient,
                }
                for param, gradient in zip(params, gradients, strict=True)
            ]
        )
    return history


def random_targets(weights: list[torch.Tensor], steps: int, ranks: int) -> Targets:
    """Different on each rank, and large enough for a sum to be told from a mean."""
    generator = torch.Generator().manual_seed(7)
    return [
        [[3 * torch.randn(w.shape, generator=generator) for w in weights] for _ in range(ranks)]
        for _ in range(steps)
    ]


def same_on_all(targets: list[list[torch.Tensor]], ranks: int) -> Targets:
    """Each step's targets, on every rank."""
    return [[step] * ranks for step in targets]


def train_oracle(
    weights: list[torch.Tensor], targets: Targets, *, maximize: bool = False, **settings: Any
) -> list[list[dict[str, torch.Tensor]]]:
    """What `train_on_targets` should return, by a single process on the mean of the targets."""
    model = InnerProducts(weights)
    reference = ReferenceMuon(model, lambda name, param: True, **settings)
    params = list(model.parameters())
    history = []
    for by_rank in targets:
        means = [mean_target(list(of_one)) for of_one in zip(*by_rank, strict=True)]
        for param, mean in zip(params, means, strict=True):
            param.grad = -mean if maximize and mean is not None else mean
        reference.step()
        history.append(
            [
                {
                    "weight": param.detach().clone(),
                    "momentum": reference.buffers[param].clone() if param in reference.buffers else None,
                    "gradient": mean,
                }
                for param, mean in zip(params, means, strict=True)
            ]
        )
    return history


def mean_target(targets: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean over the ranks, to which one without a target adds zero; None if no rank has one."""
    like = next((target for target in targets if target is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if t is None else t for t in targets]).mean(0)


def assert_histories_close(found: list, expected: list, tolerance: float = 1e-5) -> None:
    """Equal in all that the oracle has."""
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for index, (ours, oracle) in enumerate(zip(mine, theirs, strict=True)):
            for what in ("gradient", "momentum", "weight"):
                if oracle[what] is None:
                    continue
                difference = (ours[what] - oracle[what]).abs().max().item()
                assert difference <= tolerance, f"{what} {index} is off by {difference} at step {step}"


def agreed(ranks: Callable, shape: tuple[int, ...], fn: Callable, *args: object, **kwargs: object) -> Any:
    """`fn(shape, ...)` on all ranks of a mesh; its one answer, bitwise the same on all of them."""
    answers = ranks(math.prod(shape), fn, shape, *args, **kwargs)
    leaves = tree_leaves(answers[0])
    for rank, answer in enumerate(answers):
        for mine, theirs in zip(leaves, tree_leaves(answer), strict=True):
            same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
            assert same, f"rank 0 has {mine}, rank {rank} {theirs}"
    return answers[0]
