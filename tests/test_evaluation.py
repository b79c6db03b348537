"""Evaluation between steps, and modules that behave differently in it."""

import pytest
import torch
import torch.nn as nn

from dmuon.engine import fsdp
from layouts import RESIDENCIES, Sizes, build
from models import assert_weights_close, backward_both, is_proj, step_both, with_oracle

pytestmark = pytest.mark.always("dp4", "hsdp2x2")


class Layer(nn.Module):
    """In training, and only then, a part of what it adds is left out, and it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 13)
        self.down_proj = nn.Linear(13, 6, bias=False)
        self.register_buffer("trained", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down_proj(torch.tanh(self.up_proj(x)))
        if not self.training:
            return x + y
        self.trained += 1
        keep = torch.tensor([1.0, 0, 1, 1, 0, 1])
        return x + y * keep * 1.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean()


def evaluate_between_steps(sizes: Sizes, reshard: bool) -> None:
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(99))

    def evaluate(mode: type) -> None:
        for one in (model, oracle):
            one.eval()
        with mode():
            torch.testing.assert_close(model(x), oracle(x), atol=1e-5, rtol=0)
        fsdp.reshard(model)  # FSDP2 itself would go on with the base parameters of before the step
        for one in (model, oracle):
            one.train()

    modes = [torch.no_grad, torch.inference_mode]
    for step in range(4):
        if step:
            evaluate(modes[step % 2])  # it finds what the last step publishes in flight
        backward_both(model, oracle, step, loss_of)
        evaluate(modes[(step + 1) % 2])  # between backward and step
        step_both(optimizer, reference)
        if step % 2:
            assert_weights_close(model, oracle)
    assert all(layer.trained == 4 for layer in model.layers)
    # A model in evaluation mode may be trained, too.
    for one in (model, oracle):
        one.eval()
    backward_both(model, oracle, 4, loss_of)
    step_both(optimizer, reference)
    assert_weights_close(model, oracle)


@pytest.mark.always("hsdp2x2-while_used")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_evaluation_between_steps(ranks, sizes, reshard):
    ranks(4, evaluate_between_steps, sizes, reshard)


def loss_in_between(sizes: Sizes, reshard: bool) -> None:
    """An evaluation between a forward and its backward leaves the weights that the backward needs."""
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step in range(3):

        def loss(m: nn.Module, seed: int) -> torch.Tensor:
            value = loss_of(m, seed)
            m.eval()
            with torch.no_grad():
                loss_of(m, 3)
            m.train()
            return value

        backward_both(model, oracle, step, loss)
        for name, param in model.named_parameters():
            assert param.requires_grad
            assert param.grad is not None or not is_proj(name, param)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-while_used")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_evaluation_between_forward_and_backward(ranks, sizes, reshard):
    ranks(4, loss_in_between, sizes, reshard)
