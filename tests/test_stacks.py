"""Stacks of experts and fused projections on every layout, against one process with a Linear for each matrix."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuon
from reference import ReferenceMuon

WIDTH, HIDDEN = 6, 4
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}
FUSED = dmuon.Structure(sizes=(6, 2, 2))  # grouped queries: 6 of queries, 2 of keys, 2 of values


class Experts(nn.Module):
    """Expert i takes the tokens that are i modulo their number; gate and up behind each other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * HIDDEN, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 2)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        # Tensor parallelism of experts is done by hand in real models; here, their pieces are brought together.
        gate_up, down = (
            w.full_tensor() if isinstance(w, DTensor) else w for w in (self.gate_up, self.down)
        )
        out = torch.zeros_like(x)
        for i in range(len(down)):
            gate, up = (x[choice == i] @ gate_up[i].T).chunk(2, dim=-1)
            out[choice == i] = (F.silu(gate) * up) @ down[i].T
        return out


class SeparateExperts(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        gates, ups = experts.gate_up.detach().chunk(2, dim=1)
        self.gate, self.up, self.down = (
            nn.ParameterList(nn.Parameter(w.clone()) for w in whole)
            for whole in (gates, ups, experts.down.detach())
        )

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i in range(len(self.down)):
            tokens = x[choice == i]
            out[choice == i] = (F.silu(tokens @ self.gate[i].T) * (tokens @ self.up[i].T)) @ self.down[i].T
        return out


class Block(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 10, bias=False)
        self.out = nn.Linear(6, WIDTH, bias=False)
        self.experts = Experts(count)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projected(self.norm(x))
        x = x + self.out(q * (k * v).sum(-1, keepdim=True))
        return x + self.experts(x, choice)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).split((6, 2, 2), dim=-1)


class SeparateBlock(Block):
    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)
        self.norm, self.out = copy.deepcopy(block.norm), copy.deepcopy(block.out)
        self.q, self.k, self.v = (
            nn.Parameter(w.clone()) for w in block.qkv.weight.detach().split((6, 2, 2))
        )
        self.experts = SeparateExperts(block.experts)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ self.q.T, x @ self.k.T, x @ self.v.T


class Mixture(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, choice)
        return self.head(x)


def separate(model: Mixture) -> Mixture:
    oracle = copy.deepcopy(model)
    oracle.blocks = nn.ModuleList(SeparateBlock(block) for block in model.blocks)
    return oracle


def is_muons(name: str, param: nn.Parameter) -> bool:
    return "blocks" in name and param.ndim > 1


STRUCTURE = {"*.qkv.weight": FUSED, "*.gate_up": dmuon.Structure(sizes=(HIDDEN, HIDDEN))}


def loss_of(model: nn.Module, seed: int, count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, WIDTH, generator=generator)
    choice = torch.arange(12) % count
    choice[choice == seed % count] = (seed + 1) % count  # on every rank another expert has nothing to do
    choice[choice == count - 1] = 0  # and one has nothing anywhere
    return model(x, choice).pow(2).mean()


def distribute(model: Mixture, sizes: dict[str, int], **options) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "ddp" in sizes:
        dmuon.dedicate_params_ddp(model, mesh["ddp"], predicate=is_muons, structure=STRUCTURE)
        dmuon.replicate(model, mesh["ddp"])
        return dmuon.Muon(model, **SETTINGS, **options)
    if "ep" in sizes:
        return distribute_experts(model, mesh, **options)
    if "tp" in sizes:
        for block in model.blocks:
            place(block.experts, "gate_up", mesh["tp"], Shard(2))
            place(block.experts, "down", mesh["tp"], Shard(1))
        where = {"mesh": mesh["dp"]}
    elif "replicate" in sizes:
        where = {"mesh": mesh["shard"], "replicate_mesh": mesh["replicate"]}
    else:
        where = {"mesh": mesh["dp"]}
    dmuon.dedicate_params(model, **where, predicate=is_muons, structure=STRUCTURE)
    around = {"mesh": mesh if "replicate" in sizes else where["mesh"]}
    for block in model.blocks:
        fully_shard(block, **around)
    fully_shard(model, **around)
    return dmuon.Muon(model, **SETTINGS, **options)


def place(module: nn.Module, name: str, mesh, placement) -> None:
    param = distribute_tensor(getattr(module, name).detach(), mesh, [placement])
    setattr(module, name, nn.Parameter(param))


def assert_equal(model: Mixture, oracle: Mixture) -> dict[str, torch.Tensor]:
    state = {name: dmuon.full_tensor(p).detach() for name, p in model.named_parameters()}
    for name, weight in oracle.named_parameters():
        theirs = name
        expert = None
        if ".experts." in name:
            theirs, _, expert = name.rpartition(".")
        block, _, part = theirs.rpartition(".")
        if part in ("gate", "up"):
            mine = state[f"{block}.gate_up"].chunk(2, dim=1)[part == "up"][int(expert)]
        elif expert is not None:
            mine = state[theirs][int(expert)]
        elif part in ("q", "k", "v"):
            mine = state[f"{block}.qkv.weight"].split((6, 2, 2))["qkv".index(part)]
        else:
            mine = state[name]
        torch.testing.assert_close(mine, weight.detach(), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    return state


def train(sizes: dict[str, int], steps: int = 4, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture()
    oracle = separate(model)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS)
    optimizer = distribute(model, sizes, **options)
    world, rank = dist.get_world_size() // sizes.get("tp", 1), dist.get_rank() // sizes.get("tp", 1)
    for step in range(steps):
        loss_of(model, 100 * step + rank).backward()
        for r in range(world):
            (loss_of(oracle, 100 * step + r) / world).backward()
        mine = dmuon.clip_grad_norm_(model, 0.05)
        theirs = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        state = assert_equal(model, oracle)
    return state


LAYOUTS = [
    pytest.param({"dp": 4}, id="dp4"),
    pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"ddp": 2}, id="ddp2"),
]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_training_equals_one_process_with_separate_matrices(ranks, sizes):
    ranks(torch.Size(sizes.values()).numel(), train, sizes)
