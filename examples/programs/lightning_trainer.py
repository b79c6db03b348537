"""Lightning's Trainer with dmuon: FSDP2 by ModelParallelStrategy, or its "ddp".

python examples/programs/lightning_trainer.py --devices 2 --strategy fsdp
"""

import argparse

import lightning as L
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LitModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.is_spread = False

    def configure_model(self) -> None:
        if self.is_spread:
            return
        self.is_spread = True
        if isinstance(self.trainer.strategy, DDPStrategy):
            mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
            dmuon.dedicate_params_ddp(self, mesh)
            return
        mesh = self.device_mesh["data_parallel"]
        dmuon.dedicate_params(self.model, mesh)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dmuon.Muon(self, lr=0.02, adamw_lr=1e-3)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if index % 5 == 0:
            self.print(f"step {index}: loss {loss.item():.3f}")
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    strategy = DDPStrategy() if args.strategy == "ddp" else ModelParallelStrategy(args.devices, 1)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=strategy,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    L.seed_everything(0)
    data = torch.randint(0, 256, (8 * args.devices * args.steps, 33)).cumsum(1) % 256
    trainer.fit(LitModel(), torch.utils.data.DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()
