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
from layouts import Model, Sizes, build, distribute, is_proj, loss_of
from models import agreed, assert_weights_close, backward_both, full_weights, step_both, with_oracle
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
    optimizer.zero_grad()  # torch's state dicts have left zeros, where they did not get to their end
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


# What frameworks pass


def given_as_to_torch(sizes: Sizes) -> None:
    def no_decay(name: str) -> bool:
        return "norm" in name or name.endswith("bias")

    def two_groups(model: nn.Module, pairs: bool) -> list[dict[str, Any]]:
        named = [(n, p) for n, p in model.named_parameters()]
        groups = [
            [pair for pair in named if not no_decay(pair[0])],
            [pair for pair in named if no_decay(pair[0])],
        ]
        lists: list[list[Any]] = groups if pairs else [[p for _, p in group] for group in groups]
        return [{"params": lists[0], "weight_decay": 0.1}, {"params": lists[1], "weight_decay": 0.0}]

    forms: list[Callable[[nn.Module], Any]] = [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: two_groups(model, False),
        lambda model: two_groups(model, True),
    ]
    settings = {"lr": 0.05, "adamw_lr": 0.01}
    for number, form in enumerate(forms):
        torch.manual_seed(1)
        model = Model()
        decays = {} if number < 4 else {"weight_decay": 0.1, "adamw_weight_decay": 0.0}
        oracle, reference = with_oracle(model, adamw_betas=(0.8, 0.9), **settings, **decays)
        if decays:  # the head is AdamW's, and decays
            head = [p for n, p in oracle.named_parameters() if n == "head.weight"]
            group = reference.adamw.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not head[0]]
            reference.adamw.add_param_group({"params": head, "weight_decay": 0.1})
        distribute(model, sizes)
        optimizer = dmuon.Muon(form(model), betas=(0.8, 0.9), **settings)
        for group in optimizer.param_groups:
            assert ("param_names" in group) == (number in (3, 5))
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        assert not names or sorted(names) == sorted(name for name, _ in model.named_parameters())
        for step in range(2):
            backward_both(model, oracle, step, loss_of)
            step_both(optimizer, reference)
            oracle.zero_grad()  # of the group that was added, too
        assert_weights_close(model, oracle)
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="mixes dedicated parameters"):
        dmuon.Muon([{"params": model.parameters(), "lr": 0.1}])
    with pytest.raises(TypeError, match="param_groups goes with a model"):
        dmuon.Muon(model.parameters(), param_groups=[])


def test_the_optimizer_takes_what_torchs_take(ranks):
    ranks(2, given_as_to_torch, {"dp": 2})
