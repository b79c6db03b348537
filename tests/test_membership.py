"""Which parameters stand in the groups of an optimizer, in which order; and what others do to them."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuon
from layouts import Model, Sizes, build, distribute, is_proj
from models import agreed, assert_weights_close, full_weights, with_oracle
from reference import ReferenceMuon
from test_mistakes import raised

FULL = StateDictOptions(full_state_dict=True)


def exchange_by_data_ptr(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What accelerate's `prepare` does. The pointer is 0 for all that a rank does not own."""

    def pointer(param: nn.Parameter) -> int:
        return getattr(param, "_local_tensor", param).data_ptr()

    by_pointer = {pointer(param): param for param in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [by_pointer[pointer(param)] for param in group["params"]]


def after_an_exchange(sizes: Sizes, only_on: int | None) -> list[str]:
    actions: dict[str, Callable[[nn.Module, dmuon.Muon], Any]] = {
        "step": lambda model, optimizer: optimizer.step(),
        "state": lambda model, optimizer: optimizer.state_dict(),
        "torch": lambda model, optimizer: torchs.get_optimizer_state_dict(model, optimizer),
        "load": lambda model, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "group": lambda model, optimizer: optimizer.add_param_group({"params": []}),
    }
    model = Model()
    optimizer = build(model, sizes)
    named = [group["params"] for group in optimizer.param_groups]
    if only_on in (None, dist.get_rank()):
        exchange_by_data_ptr(model, optimizer)
    messages = [raised(RuntimeError, action, model, optimizer) for action in actions.values()]
    for group, params in zip(optimizer.param_groups, named, strict=True):
        group["params"] = params
    optimizer.step()  # as it was
    return messages


@pytest.mark.parametrize("only_on", [None, 1])
def test_parameters_that_were_exchanged_are_refused_on_every_rank(ranks, only_on):
    for message in agreed(ranks, {"dp": 2}, after_an_exchange, only_on):
        assert re.match(r"layers\.\d\.\w+\.weight is .* in the optimizer's parameter groups", message)
        assert "Build dmuon.Muon last" in message


def other_groups_on_a_rank(sizes: Sizes) -> str:
    model = Model()
    distribute(model, sizes)
    names = ["layers.0.up_proj.weight", "layers.1.up_proj.weight"]
    mine = names[dist.get_rank()]
    optimizer = dmuon.Muon(model, param_groups=[{"params": [mine], "lr": 0.3}])
    return raised(RuntimeError, optimizer.step)


def thawed_and_forgotten(sizes: Sizes) -> str:
    model = Model()
    distribute(model, sizes)
    model.layers[1].up_proj.weight.requires_grad_(False)
    optimizer = dmuon.Muon(model)
    optimizer.step()
    model.layers[1].up_proj.weight.requires_grad_(True)
    return raised(RuntimeError, optimizer.step)


def test_groups_that_differ_or_lack_something(ranks):
    assert "do not have the same parameter groups" in agreed(ranks, {"dp": 2}, other_groups_on_a_rank)
    message = agreed(ranks, {"dp": 2}, thawed_and_forgotten)
    assert message.startswith("layers.1.up_proj.weight is trainable, and not in")


# Order


def groups_in_any_order(model: nn.Module, mixed: bool) -> list[dict[str, Any]]:
    """Two groups, in module order; mixed: as a rank that took the names from a set would list them."""
    names = [name for name, _ in model.named_parameters()]
    if mixed and dist.get_rank() % 2:
        names.reverse()
    return [
        {"params": [name for name in names if is_proj(name, model.get_parameter(name))]},
        {"params": [name for name in names if not is_proj(name, model.get_parameter(name))]},
    ]


class Run:
    def __init__(self, sizes: Sizes, seed: int, mixed: bool) -> None:
        torch.manual_seed(seed)
        self.model = Model(hidden=16)
        self.oracle, self.reference = with_oracle(self.model)
        distribute(self.model, sizes)
        self.optimizer = dmuon.Muon(self.model, param_groups=groups_in_any_order(self.model, mixed))

    def train(self, seeds: range, reference: ReferenceMuon | None = None) -> None:
        for seed in seeds:
            for model in (self.model, *([self.oracle] if reference else [])):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
                model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if reference is not None:
                reference.step()
                reference.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        state = torchs.get_optimizer_state_dict(self.model, self.optimizer, options=FULL)["state"]
        return {
            f"{name} {key}": value.clone() for name, entry in state.items() for key, value in entry.items()
        }


def order_of_a_set(sizes: Sizes) -> None:
    run = Run(sizes, 1, mixed=True)
    run.train(range(3), run.reference)
    assert_weights_close(run.model, run.oracle)
    state = run.state()
    for name, param in run.oracle.named_parameters():
        if is_proj(name, param):
            buffer = run.reference.buffers[param]
            assert (state[f"{name} momentum_buffer"] - buffer).abs().max() < 1e-5, name
        else:
            moment = run.reference.adamw.state[param]["exp_avg"]
            assert (state[f"{name} exp_avg"] - moment).abs().max() < 1e-5, name
    # A good checkpoint, by number and by name, into such a run.
    good = Run(sizes, 1, mixed=False)
    good.train(range(3))
    expected = good.state()
    assert all(torch.equal(value, state[key]) for key, value in expected.items())
    numbered = copy.deepcopy(good.optimizer.state_dict())  # torch's load does not copy AdamW's state
    named = copy.deepcopy(torchs.get_optimizer_state_dict(good.model, good.optimizer))
    by_number, by_name = (Run(sizes, 2, mixed=True) for _ in range(2))
    for other in (by_number, by_name):
        other.model.load_state_dict(good.model.state_dict())
    by_number.optimizer.load_state_dict(numbered)
    torchs.set_optimizer_state_dict(by_name.model, by_name.optimizer, named)
    good.train(range(3, 4))
    weights = full_weights(good.model)
    for other in (by_number, by_name):
        assert all(torch.equal(value, expected[key]) for key, value in other.state().items())
        other.train(range(3, 4))
        assert all(torch.equal(value, weights[name]) for name, value in full_weights(other.model).items())


@pytest.mark.always("dp2")
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"ddp": 2}], ids=["dp2", "dp2-tp2", "ddp2"])
def test_parameters_given_in_another_order_on_each_rank(ranks, sizes):
    ranks(4 if "tp" in sizes else 2, order_of_a_set, sizes)
