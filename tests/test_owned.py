"""Dedicated weights and gradients outside of forward: penalties, changes, means, conversions."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import dmuon
from layouts import LAYOUTS, Model, Sizes, build, distribute, loss_of
from models import (
    InnerProducts,
    assert_weights_close,
    backward_both,
    everything,
    is_proj,
    step_both,
    with_oracle,
)
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


WHOLE = {
    "var": lambda p, other: p.var(),
    "max": lambda p, other: p.max(),
    "argmin": lambda p, other: p.argmin(),
    "median": lambda p, other: p.abs().median(),
    "infinity norm": lambda p, other: p.norm(float("inf")),
    "infinity norm of a list": lambda p, other: torch._foreach_norm([p.detach()], float("inf"))[0],
    "sums of rows": lambda p, other: p.sum(1),
    "means of columns": lambda p, other: p.mean(0, keepdim=True),
    "rows of norm 1": lambda p, other: p / p.norm(dim=1, keepdim=True),
    "columns of norm 1": lambda p, other: p / p.norm(dim=0),
    "finite": lambda p, other: torch.isfinite(p).all(),
    "sorted": lambda p, other: p.sort(0).values,
    "three dims": lambda p, other: (p.sum(1)[None, :, None] * p).cumsum(2),
    "another owner": lambda p, other: (p - other).square().sum(),
}
OF_PARTS = {
    "view": lambda p: p.view(-1),
    "row": lambda p: p[0],
    "product": lambda p: p @ p.t(),
    "write to a view": lambda p: p.t().zero_(),
}


def compute(sizes: Sizes) -> None:
    """What is computed from whole weights and gradients, and the gradients of it; by name, what cannot be."""
    model, oracle, _, _ = started(sizes)
    backward_both(model, oracle, 0, loss_of)
    name = "layers.{}.up_proj.weight"
    mine = [model.get_parameter(name.format(layer)) for layer in range(2)]
    theirs = [oracle.get_parameter(name.format(layer)) for layer in range(2)]
    for what, operation in WHOLE.items():
        for pair, expected in (mine, theirs), ([p.grad for p in mine], [p.grad for p in theirs]):
            torch.testing.assert_close(whole(operation(*pair)), operation(*expected), msg=what)
        for one, other in (mine, theirs):
            one.grad = other.grad = None
        mean = [operation(*pair) for pair in (mine, theirs)]
        if mean[1].requires_grad:
            for result in mean:
                (result * result).sum().backward()
            torch.testing.assert_close(whole(mine[0].grad), theirs[0].grad, msg=what)
        backward_both(model, oracle, 0, loss_of)
    everywhere = sizes == {"ddp": 4}
    for what, operation in OF_PARTS.items():
        for tensor in [mine[0].grad] if everywhere else [mine[0], mine[0].grad]:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"up_proj\.weight is a .* of its rows"):
                assert operation(tensor) is None, what


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_what_is_computed_from_weights_and_gradients(ranks, sizes):
    ranks(4, compute, sizes)


def scale_gradients(sizes: Sizes) -> None:
    """Of a matrix that no rank has used, scaled or zeroed: it is still none, until one is added."""
    for change, is_updated in (
        (lambda grad: grad.mul_(2.0).zero_(), False),
        (lambda grad: grad.add_(torch.zeros_like(grad)), True),
    ):
        model = InnerProducts([torch.ones(3, 4), torch.ones(3, 4)])
        distribute(model, sizes, predicate=everything, hook_boundary=lambda name, module: not name)
        optimizer = dmuon.Muon(model, weight_decay=0.5)
        model([torch.eye(3, 4), None]).backward()
        used, unused = model.layers[0].weight, model.layers[1].weight
        change(unused.grad)
        optimizer.step()
        optimizer.synchronize()
        assert not torch.equal(whole(used), torch.ones(3, 4))
        assert torch.equal(whole(unused), torch.ones(3, 4)) != is_updated


def test_a_gradient_that_nobody_had_may_be_scaled(ranks):
    ranks(2, scale_gradients, {"dp": 2})


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
