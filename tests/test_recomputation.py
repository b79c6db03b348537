"""Activation checkpointing: of layers, of parts of them, of every other one, and of some operations only."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dmuon
from layouts import FEWER, LAYOUTS, Model, Sizes, build
from models import assert_weights_close, backward_both, dedicate, is_proj, make_mesh, step_both, with_oracle
from test_engine import Layer, Routed, SometimesLayer

pytestmark = pytest.mark.always("dp4", "ddp2-tp2")


class Recomputed(Routed):
    mode = True

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = x + checkpoint(self.layers[index], x, use_reentrant=self.mode)
        return self.head(x)


def recompute(sizes: Sizes, reshard: bool, reentrant: bool) -> None:
    model = Recomputed()
    model.mode = reentrant
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        # FSDP2's own gradients are wrong where reentrant recomputation meets a layer used twice.
        return m(x, [0, 1, 2, 3] if reentrant else [0, 1, 2, 3, 1]).square().mean()

    for step in range(3):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-while_used-False", "ddp2-tp2-True")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("sizes", "reshard"), FEWER)
def test_activation_checkpointing(ranks, sizes, reshard, reentrant):
    ranks(4, recompute, sizes, reshard, reentrant)


class InsideBlock(nn.Module):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(6, None)
        self.second = Layer(6, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.first, x, use_reentrant=self.reentrant)
        return x + checkpoint(self.second, x, use_reentrant=self.reentrant)


class InsideModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InsideBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def recompute_inside(sizes: Sizes, reshard: bool, reentrant: bool) -> None:
    model = InsideModel()
    for layer in model.layers:
        layer.reentrant = reentrant
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        return m(x).square().mean()

    for step in range(2):
        backward_both(model, oracle, step, loss)
        for record in dmuon.get_dedicated_params(model):
            assert record.module.weight is record.resting
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-while_used-True", "ddp2-tp2-False")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("sizes", "reshard"), FEWER)
def test_activation_checkpointing_inside_a_layer(ranks, sizes, reshard, reentrant):
    ranks(4, recompute_inside, sizes, reshard, reentrant)


class Alternating(nn.Module):
    """Every other layer is recomputed, and one matrix is used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SometimesLayer() for _ in range(4))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index % 2:
                x = checkpoint(layer, x, False, use_reentrant=True)
            else:
                x = layer(x, use and index == 2)
        return x


def some_ranks_and_recomputation(process_groups: str) -> None:
    model = Alternating()
    oracle, reference = with_oracle(model)
    mesh = make_mesh((2,))
    dedicate(model, mesh, predicate=is_proj, process_groups=process_groups)
    optimizer = dmuon.Muon(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        return m(x, seed % 2 == 0).square().mean()

    for step in range(2):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("process_groups", ["isolated", "shared"])
def test_one_order_of_reductions_whatever_a_rank_uses(ranks, process_groups):
    ranks(2, some_ranks_and_recomputation, process_groups)


# Of some operations only

SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # the others are recomputed
selective = partial(create_selective_checkpoint_contexts, SAVED)


class Selective(Model):
    """Layers that have the checkpoint around them, outside what `fully_shard` wraps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=selective)
        return self.head(x)


def recompute_some(sizes: Sizes, inside: bool, **muon: Any) -> None:
    model = Model() if inside else Selective()
    oracle, reference = with_oracle(model)
    if inside:
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer, context_fn=selective)
    optimizer = build(model, sizes, **muon)
    recomputed = count_recomputations(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        return m(x).square().mean()

    for step in range(3):
        recomputed.clear()
        backward_both(model, oracle, step, loss)
        assert recomputed == ["forward", "forward", "again", "again"]
        step_both(optimizer, reference)
        if step:  # after the first, the next forward finds the publish in flight
            assert_weights_close(model, oracle)


def count_recomputations(model: nn.Module) -> list[str]:
    """What the layers' norms see: a forward, or that they are run again for backward."""
    seen: list[str] = []

    def hook(module: nn.Module, args: Any) -> None:
        again = torch._C._current_graph_task_id() != -1
        seen.append("again" if again else "forward")

    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_pre_hook(hook)
    return seen


@pytest.mark.always("dp4-inside", "ddp2-tp2-around")
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_selective_checkpointing(ranks, sizes, inside):
    ranks(4, recompute_some, sizes, inside)


@pytest.mark.always("{'dp': 2, 'tp': 2}")
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"ddp": 2, "tp": 2}], ids=str)
def test_selective_checkpointing_with_distributed_gram(ranks, sizes):
    """Products of the update, which a forward may have to wait for, are not those of the layer."""
    gram = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}
    ranks(4, recompute_some, sizes, True, **gram)
