"""A backward that raises, in a model with base parameters that FSDP2 or `replicate` cares for."""

import pytest
import torch
import torch.nn as nn

from layouts import LAYOUTS, Model, Sizes, build, loss_of
from models import assert_weights_close, backward_both, step_both, with_oracle


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


@pytest.mark.parametrize("zero_by_model", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_the_next_iteration_is_right(ranks, sizes, layer, zero_by_model):
    ranks(4, train, sizes, layer == 0, layer, zero_by_model)
