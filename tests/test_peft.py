"""PEFT's adapters, put in before the matrices are dedicated; and what is said of those that come later."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from models import Transformer
from programs import dedicated_names, difference, loss_on, note, seeded, tokens_of, train_alone, whole_weights

CONFIG = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj", "o_proj"], lora_dropout=0.0)


def adapted() -> nn.Module:
    model = get_peft_model(seeded(), copy.deepcopy(CONFIG))
    with torch.no_grad():  # PEFT starts them at zero
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    return model


def shard(model: nn.Module, layers: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches_of(steps: int) -> list[list[torch.Tensor]]:
    return [[tokens_of(10 * step + rank) for rank in range(dist.get_world_size())] for step in range(steps)]


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for parts in batches_of(steps):
        loss_on(model, parts[dist.get_rank()]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def adapters_before() -> dict[str, Any]:
    start = adapted()
    model = copy.deepcopy(start)
    shard(model, model.base_model.model.layers)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
    train(model, optimizer, 3)
    weights = whole_weights(model)
    expected, _ = train_alone(start, dedicated_names(model), batches_of(3), max_norm=0.5)
    frozen = {name for name, param in start.named_parameters() if not param.requires_grad}
    found = {
        "trained": difference(weights, expected),
        "dedicated": sorted(dedicated_names(model))[:2],
        "frozen": max((weights[n] - dict(start.named_parameters())[n]).abs().max().item() for n in frozen),
    }
    # What PEFT saves, from a whole state dict.
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    adapters = get_peft_model_state_dict(model, state_dict=whole)
    alone = adapted()
    alone.load_state_dict(whole)
    theirs = get_peft_model_state_dict(alone)
    found["adapters"] = difference(dict(adapters), dict(theirs))
    # Merged: into a model of one process.
    merged = alone.merge_and_unload()
    inputs = tokens_of(5)
    with torch.no_grad():
        found["merged"] = (merged(inputs) - model(inputs)).abs().max().item()
    # On the sharded model, products of what one rank has whole are refused.
    with pytest.raises(RuntimeError, match="is a dedicated parameter, whole on its owner"):
        model.merge_adapter()
    return found


def test_adapters_before_dedicating(ranks):
    results = ranks(2, adapters_before, timeout=120)
    assert all("lora_A" in found.pop("dedicated")[0] for found in results)
    note("peft", "LoRA, then dmuon, FSDP2", results[0])
    note("peft", "merge on the sharded model", "a product needs whole factors; merge a whole copy")
    for found in results:
        assert found["trained"] <= 1e-5, found
        assert found["frozen"] == 0.0, found
        assert found["adapters"] == 0.0, found
        assert found["merged"] <= 1e-5, found


def adapters_after(when: str) -> None:
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    message = r"layers\.0\.q_proj\.weight is a dedicated parameter, and .*Put adapters in first"
    dmuon.dedicate_params(model, mesh)
    if when == "dedicated":
        get_peft_model(model, copy.deepcopy(CONFIG))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if when == "sharded":
        get_peft_model(model, copy.deepcopy(CONFIG))
    if when != "trained":
        with pytest.raises(RuntimeError, match=message):
            dmuon.Muon(model)
        return
    dmuon.Muon(model)
    loss_on(model, tokens_of(0)).backward()
    get_peft_model(model, copy.deepcopy(CONFIG))
    with pytest.raises(RuntimeError, match=message):
        loss_on(model, tokens_of(1))


@pytest.mark.parametrize("when", ["dedicated", "sharded", "trained"])
def test_adapters_after_dedicating(ranks, when):
    ranks(2, adapters_after, when)
    note("peft", "adapters after dedicating", "what is put around a dedicated weight would not be trained")
