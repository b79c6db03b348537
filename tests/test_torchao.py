"""torchao's low-precision training: modules around plain weights work, weights of other classes do not."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from layouts import Model
from models import is_proj
from programs import difference, note, train_alone, whole_weights

pytest.importorskip("torchao")

WIDTH, HIDDEN = 16, 32  # multiples of 16, as float8 products need


def in_blocks(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in name


def float8(model: nn.Module, *, all_gather: bool = False) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=all_gather, emulate=True
    )  # no CPU has the products
    convert_to_float8_training(model, config=config, module_filter_fn=in_blocks)


def int8(model: nn.Module, *, kind: str) -> None:
    import torchao.prototype.quantized_training as training
    from torchao.quantization import quantize_

    quantize_(model, getattr(training, kind)(), filter_fn=in_blocks)


CLASSES: dict[str, Callable[[nn.Module], None]] = {
    "int8_weight_only_quantized_training": partial(int8, kind="int8_weight_only_quantized_training"),
    "int8_mixed_precision_training": partial(int8, kind="int8_mixed_precision_training"),
    "float8, enable_fsdp_float8_all_gather": partial(float8, all_gather=True),
}


def loss_on(model: nn.Module, seed: torch.Tensor) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(int(seed)))
    return model(x).square().mean()


def shard(model: nn.Module, mesh: Any) -> None:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def told(action: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        action()
    return str(caught.value)


def convert_and_train() -> tuple[dict[str, float], dict[str, str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(1)
    start = Model(WIDTH, HIDDEN)
    float8(start)
    model = copy.deepcopy(start)
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    batches = [[torch.tensor(2 * step + rank) for rank in range(2)] for step in range(2)]
    for parts in batches:
        loss_on(model, parts[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    chosen = {name for name, param in start.named_parameters() if is_proj(name, param)}
    expected, _ = train_alone(start, chosen, batches, loss=loss_on)
    found = {"trained": difference(whole_weights(model), expected)}

    refused = {}
    for kind, convert in CLASSES.items():
        model = Model(WIDTH, HIDDEN)
        convert(model)
        refused[kind] = told(partial(dmuon.dedicate_params, model, mesh, predicate=is_proj))
    for kind, convert in {"float8": float8, **CLASSES}.items():
        model = Model(WIDTH, HIDDEN)
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        convert(model)
        refused[f"{kind}, after dedicating"] = told(
            lambda model=model: (shard(model, mesh), dmuon.Muon(model))
        )
    return found, refused


def test_conversions(ranks):
    results = ranks(2, convert_and_train, timeout=120)
    assert results[0][1] == results[1][1]
    found, refused = results[0]
    note("torchao", "float8 training, then dmuon, FSDP2", found)
    assert results[1][0]["trained"] <= 1e-5
    for kind, message in refused.items():
        words = (
            "is no longer a part of|another parameter has been put"
            if "after" in kind
            else "tensor class of its own"
        )
        assert re.match(rf"layers\.0\.mix_proj\.weight is a .*({words})", message), (kind, message)
    note(
        "torchao",
        "int8 training; float8 all-gather",
        "a weight's own tensor class would be lost; leave it out",
    )
    note("torchao", "conversion after dedicating", "what it puts in place of a weight would not be trained")
