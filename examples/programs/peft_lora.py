"""LoRA by PEFT with dmuon: adapters first, then the three lines.

torchrun --nproc-per-node 2 examples/programs/peft_lora.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_trainer import Model
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


def main() -> None:
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if on_gpus:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = "cuda" if on_gpus else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["up_proj", "down_proj"])
    model = get_peft_model(Model(), config)

    dmuon.dedicate_params(model, mesh["dp"])
    for layer in model.base_model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

    tokens = torch.randint(0, 256, (8, 33), device=device).cumsum(1) % 256
    for step in range(20):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    # Merged, as a model without adapters, in one process.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        alone = get_peft_model(Model(), config)
        alone.load_state_dict(whole)
        merged = alone.merge_and_unload()
        print(f"merged: {sum(param.numel() for param in merged.parameters()):,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
