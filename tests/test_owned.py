"""Dedicated weights and gradients outside of forward: penalties, changes, means, conversions."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import dmuon
from layouts import LAYOUTS, Model, Sizes, build, loss_of
from models import assert_weights_close, backward_both, is_proj, step_both, with_oracle
from ranks import RanksFailed

pytestmark = pytest.mark.always("hsdp2x2", "dp2-tp2")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PENALTIES = {
    "p.full_tensor()": lambda p: whole(p).pow(2).sum(),
    "dmuon.full_tensor(p)": lambda p: dmuon.full_tensor(p).pow(2).sum(),
    "p.square().sum()": lambda p: whole(p.square().sum()),
    "p.abs().mean()": lambda p: whole(p.abs().mean()),
    "(p ** 2).mean()": lambda p: whole((p**2).mean()),
    "p.mean()": lambda p: whole(p.mean()),
    "p.norm()": lambda p: whole(p.norm()),
}
CHANGES = ["p.grad.add_(p)", "p.grad + p"]


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if is_proj(name, param)]


def started(sizes: Sizes) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model, weight_decay=0.1)
    return model, oracle, build(model, sizes, weight_decay=0.1), reference


def train(sizes: Sizes, kind: str) -> None:
    """Three steps equal to the oracle's, the gradients too."""
    model, oracle, optimizer, reference = started(sizes)

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        out = loss_of(model, seed)
        if kind in PENALTIES:
            out = out + 0.3 * sum(PENALTIES[kind](p) for _, p in matrices(model))
        return out

    for step in range(2):
        backward_both(model, oracle, step, loss)
        for some in (model, oracle):
            for _, param in matrices(some):
                if kind == "p.grad.add_(p)":
                    param.grad.add_(param.detach(), alpha=0.1)
                elif kind == "p.grad + p":
                    param.grad = param.grad + 0.1 * param.detach()
        for (name, mine), (_, theirs) in zip(matrices(model), matrices(oracle), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, atol=1e-5, rtol=1e-5, msg=name)
            torch.testing.assert_close(whole(mine.grad.mean()), theirs.grad.mean(), atol=1e-5, rtol=1e-5)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always(
    "dp2-tp2-p.norm()",
    "dp2-tp2-p.grad + p",
    "hsdp2x2-p.grad.add_(p)",
    "hsdp2x2-p.mean()",
    "hsdp2x2-(p ** 2).mean()",
    "dp2-tp2-p.full_tensor()",
    "hsdp2x2-dmuon.full_tensor(p)",
    "hsdp2x2-p.abs().mean()",
    "hsdp2x2-p.square().sum()",
)
@pytest.mark.parametrize("kind", [*PENALTIES, *CHANGES])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_what_is_done_to_weights_and_gradients_counts(ranks, sizes, kind):
    ranks(4, train, sizes, kind)


def convert(sizes: Sizes) -> None:
    """Whole weights and state dicts right after a conversion, without a forward in between."""
    model, oracle, _, _ = started(sizes)
    model(torch.ones(2, 6))
    for change in (nn.Module.double, nn.Module.cpu, nn.Module.float):
        change(model)
        change(oracle)
        for (name, mine), (_, theirs) in zip(matrices(model), matrices(oracle), strict=True):
            assert torch.equal(dmuon.full_tensor(mine), theirs), name
            assert torch.equal(mine.full_tensor(), theirs), name
        assert {value.dtype for value in model.state_dict().values()} == {next(oracle.parameters()).dtype}
    torch.testing.assert_close(whole(model(torch.ones(2, 6))), oracle(torch.ones(2, 6)))
    model.to_empty(device="cpu")
    for _, param in matrices(model):
        nn.init.ones_(param)
        assert torch.equal(param.full_tensor(), torch.ones(param.shape))
    model.state_dict()


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_weights_are_whole_after_a_conversion(ranks, sizes):
    ranks(4, convert, sizes)


def mix(sizes: Sizes) -> None:
    """A weight and a tensor that lies in even chunks, as FSDP2 would have it."""
    model, _, _, _ = started(sizes)
    _, param = matrices(model)[0]
    even = model.state_dict()[matrices(model)[0][0]]
    with torch.no_grad():
        param.add_(even)


@pytest.mark.parametrize("sizes", [LAYOUTS[0], LAYOUTS[2]])
def test_what_lies_elsewhere_is_refused_by_name_on_every_rank(ranks, sizes):
    with pytest.raises(RanksFailed, match=r"mix_proj\.weight is a dedicated parameter, whole on") as error:
        ranks(4, mix, sizes)
    assert len(error.value.failed) == 4
