"""accelerate's plain loop with dmuon: FSDP2 on GPUs, DDP on CPUs (accelerate has no FSDP there).

accelerate launch --num-processes 2 examples/programs/accelerate_loop.py            # GPUs
accelerate launch --cpu --num-processes 2 examples/programs/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from lightning_trainer import Model
from torch.utils.data import DataLoader

from dmuon.integrations.accelerate import muon


def main() -> None:
    plugin = None
    if torch.cuda.is_available():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
        )
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin, gradient_accumulation_steps=2)

    torch.manual_seed(0)
    model = Model()
    optimizer = muon(model, lr=0.02, adamw_lr=1e-3)
    data = torch.randint(0, 256, (8 * accelerator.num_processes * 20, 33)).cumsum(1) % 256
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))

    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0:
            accelerator.print(f"batch {step}: loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
