"""A backward that raises, in a model with base parameters that FSDP2 or `replicate` cares for."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import dmuon
from layouts import LAYOUTS, Model, Sizes, build, dedicate, loss_of, make_mesh
from models import assert_weights_close, backward_both, step_both, with_oracle

pytestmark = pytest.mark.always("dp4-0-True", "hsdp2x2-2-False", "dp2-tp2-2-True", "ddp2-tp2-0-False")


class Boom(Exception):
    """Of a user's, caught by the training loop."""


def boom(gradient: torch.Tensor) -> None:
    raise Boom


def break_backward(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    output.register_hook(boom)


def train(sizes: Sizes, reshard: bool, layer: int, zero_by_model: bool) -> None:
    torch.manual_seed(0)
    model = Model(depth=3)
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step in range(4):
        if step in (0, 2):  # in the first iteration, and in a later one
            hook = model.layers[layer].register_forward_hook(
                lambda m, args, out: out.register_hook(boom) and None
            )
            with pytest.raises(Boom):
                loss_of(model, 99).backward()
            hook.remove()
            (model if zero_by_model else optimizer).zero_grad()
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-0-True", "dp2-tp2-2-True")
@pytest.mark.parametrize("zero_by_model", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_the_next_iteration_is_right(ranks, sizes, layer, zero_by_model):
    ranks(4, train, sizes, layer == 0, layer, zero_by_model)


class Halves(nn.Module):
    """Two models in one, each wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Model(depth=1), Model(depth=1)])

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out = self.halves[0](x)
        return out + self.halves[1](x) if both else out


def one_half_first(both: bool, seed: int, model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return model(x, both).square().mean()


def half_has_never_run(sizes: Sizes) -> None:
    torch.manual_seed(0)
    model = Halves()
    oracle, reference = with_oracle(model)
    mesh = make_mesh(sizes)
    dedicate(model, mesh)
    for half in model.halves:
        fully_shard(half, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model)
    for step, both in enumerate([False, True]):
        hook = model.halves[0].layers[0].register_forward_hook(break_backward)
        with pytest.raises(Boom):
            one_half_first(both, 99, model).backward()
        hook.remove()
        optimizer.zero_grad()
        backward_both(model, oracle, step, lambda m, seed: one_half_first(True, seed, m))
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


def test_half_of_the_model_has_never_run(ranks):
    ranks(4, half_has_never_run, {"dp": 4})
