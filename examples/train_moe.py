"""Train a small mixture of experts with expert parallelism: experts stay where they lie.

    torchrun --nproc-per-node 4 examples/train_moe.py --ep 2

The ranks are a mesh (efsdp, ep). Dense weights are sharded over all of them; experts over `ep`, and each
rank's experts over `efsdp`. Tokens are gathered over `ep`, every rank lets its experts answer, and the
answers are summed back; step() sends nothing for experts. Attention has grouped queries in one fused
projection, whose matrices `structure` names.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import dmuon
from text_data import VOCAB_SIZE, TextData

WIDTH, HEADS, KEY_HEADS, SIZE = 64, 4, 2, 16
HIDDEN, EXPERTS, CHOSEN, LAYERS = 96, 8, 2, 2
QKV = (HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, sum(QKV), bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split(QKV, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Weights [experts, out, in]; with expert parallelism, this rank's part of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)
        self.mesh: DeviceMesh | None = None

    def distribute(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name in ("gate_up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [tokens, width]; weights: [tokens, experts], zero for those that are not chosen."""
        local, first = [self.gate_up, self.down], 0
        if self.mesh is not None:
            local = [w.to_local() for w in local]
            for weight in local:  # its gradient comes from the tokens of all ep ranks; the mean is wanted
                if weight.requires_grad:
                    weight.register_hook(lambda gradient: gradient / self.mesh.size())
            x, weights = (
                DTensor.from_local(t, self.mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
                for t in (x, weights)
            )
            first = self.mesh.get_local_rank() * len(local[0])
        answers = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(*local, strict=True), start=first):
            tokens = weights[:, number].nonzero().squeeze(-1)
            gate, up = (x[tokens] @ gate_up.T).chunk(2, dim=-1)
            answer = (F.silu(gate) * up) @ down.T
            answers = answers.index_add(0, tokens, answer * weights[tokens, number, None])
        if self.mesh is None:
            return answers
        return (
            DTensor.from_local(answers, self.mesh, [Partial()])
            .redistribute(placements=[Shard(0)])
            .to_local()
            .clone()
        )


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = F.softmax(x @ self.weight.T, dim=-1)
        best = chances.topk(CHOSEN, dim=-1)
        return torch.zeros_like(chances).scatter(-1, best.indices, best.values)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.router, self.experts = Attention(), Router(), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        tokens = self.norms[1](x).flatten(0, 1)
        return x + self.experts(tokens, self.router(tokens)).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


STRUCTURE = {
    "*.qkv.weight": dmuon.Structure(sizes=QKV),
    "*.experts.gate_up": dmuon.Structure(sizes=(HIDDEN, HIDDEN)),
}


def build(mesh: DeviceMesh, lr: float) -> tuple[Model, dmuon.Muon]:
    """mesh: (efsdp, ep), over all ranks."""
    torch.manual_seed(0)
    model = Model()
    every = mesh["efsdp", "ep"]._flatten("dp")
    for layer in model.layers:
        layer.experts.distribute(mesh["ep"])
    dmuon.dedicate_params(model, every, structure=STRUCTURE)
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["efsdp"])
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    return model, dmuon.Muon(model, lr=lr, adamw_lr=3e-3)


def train(args: argparse.Namespace) -> list[float]:
    """Returns the mean loss of each step."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks % args.ep or EXPERTS % args.ep:
        raise SystemExit(f"--ep {args.ep} must divide the {ranks} ranks and the {EXPERTS} experts")
    mesh = init_device_mesh("cpu", (ranks // args.ep, args.ep), mesh_dim_names=("efsdp", "ep"))
    model, optimizer = build(mesh, args.lr)
    if rank == 0:
        print(dmuon.summary(model), flush=True)
    data = TextData(None, seq_len=64, batch_size=args.batch_size, rank=rank, ranks=ranks, seed=0)
    losses = []
    for step in range(1, args.steps + 1):
        inputs, targets = data.train_batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if step % args.log_every == 0:
            numbers = optimizer.metrics({"experts": "*.experts.*"})
            if rank == 0:
                idle, rms = numbers["idle_share/experts"], numbers["update_rms/experts"]
                print(
                    f"step {step}: loss {losses[-1]:.4f}, idle experts {idle:.0%}, update rms {rms:.3f}",
                    flush=True,
                )
        optimizer.zero_grad()
    return losses


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks that divide the experts (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="sequences of all ranks (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Muon (default: %(default)s)")
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between lines (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    try:
        train(args)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
