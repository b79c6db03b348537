"""Parameters without a gradient: unused in a step, on all ranks or on some, or frozen for good."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dmuon
import targets as given
from dmuon.engine.runtime import find_runtime
from layouts import LAYOUTS, RESIDENCIES, Sizes, build, data_rank, replicas_of
from models import (
    InnerProducts,
    Transformer,
    agreed,
    assert_weights_close,
    everything,
    full_weights,
    loss_of,
    mean_backward,
    step_both,
    with_oracle,
)
from targets import Targets, assert_histories_close, momentum_of, train_on_targets, train_oracle

pytestmark = pytest.mark.always("hsdp2x2", "ddp2-tp2")

SETTINGS = {"lr": 0.1, "weight_decay": 0.1}
WEIGHTS = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in [(4, 3), (3, 4), (5, 2)]]
A, B, C = range(3)


def targets_without(skipped: list[list[list[int]]], ranks: int) -> Targets:
    """Random targets, none where `skipped[step][rank]` lists the weight; ranks: how many there are."""
    rng = torch.Generator().manual_seed(2)
    return [
        [
            [None if i in absent else torch.randn(w.shape, generator=rng) for i, w in enumerate(WEIGHTS)]
            for absent in by_rank[:ranks]
        ]
        for by_rank in skipped
    ]


# Unused in a step


@pytest.mark.always("hsdp2x2-while_used-one_group")
@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_a_matrix_unused_on_every_rank_is_left_alone(ranks, sizes, reshard, one_group):
    everybody, nobody = [[]] * 4, [[B]] * 4
    targets = targets_without([everybody, nobody, everybody, nobody, nobody], replicas_of(sizes))
    history = agreed(
        ranks, sizes, train_on_targets, WEIGHTS, targets, reshard=reshard, one_group=one_group, **SETTINGS
    )
    assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
    for used, unused in [(0, 1), (2, 3), (2, 4)]:
        for what in ("weight", "momentum"):  # no decay, and no momentum that dies away
            assert torch.equal(history[unused][B][what], history[used][B][what])
        if not one_group:  # the group did not run at all
            assert history[unused][B]["gradient"] is None


@pytest.mark.always("hsdp2x2-a_group_each", "ddp2-tp2-one_group")
@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_matrix_unused_from_the_first_step_on_waits_for_its_turn(ranks, sizes, one_group):
    targets = targets_without([[[A, C]] * 4, [[A]] * 4, [[]] * 4], replicas_of(sizes))
    history = agreed(ranks, sizes, train_on_targets, WEIGHTS, targets, one_group=one_group, **SETTINGS)
    assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
    assert torch.equal(history[1][A]["weight"], WEIGHTS[A])


@pytest.mark.always("hsdp2x2-while_used")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_a_matrix_used_on_one_rank_gets_its_share_of_the_gradient(ranks, sizes, reshard):
    replicas = replicas_of(sizes)
    for user in range(replicas):
        only_one = [[] if rank == user else [A, B] for rank in range(4)]
        targets = targets_without([only_one, [[B]] * 4, only_one], replicas)
        history = agreed(
            ranks, sizes, train_on_targets, WEIGHTS, targets, reshard=reshard, one_group=True, **SETTINGS
        )
        share = targets[0][user][B] / replicas
        torch.testing.assert_close(history[0][B]["gradient"], share, atol=1e-7, rtol=1e-6)
        assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
        assert torch.equal(history[1][B]["weight"], history[0][B]["weight"])


def unused_after_a_load(sizes: Sizes) -> dict[str, Any]:
    """A step, a checkpoint, another model and optimizer, a step without B; the first model does the same."""
    rng = torch.Generator().manual_seed(3)
    targets = [torch.randn(weight.shape, generator=rng) for weight in WEIGHTS]
    without = [None if index == B else target for index, target in enumerate(targets)]
    models = [InnerProducts(WEIGHTS), InnerProducts([torch.zeros_like(weight) for weight in WEIGHTS])]
    optimizers = []
    for model in models:
        given.distribute(model, sizes)
        optimizers.append(dmuon.Muon(model, **SETTINGS))
    given.train_step(models[0], optimizers[0], targets)
    state = get_state_dict(models[0], optimizers[0])
    before = full_weights(models[0])
    set_state_dict(models[1], optimizers[1], model_state_dict=state[0], optim_state_dict=state[1])
    went_on, resumed = (given.train_step(m, o, without) for m, o in zip(models, optimizers, strict=True))
    for mine, theirs in zip(resumed, went_on, strict=True):
        assert torch.equal(mine["weight"], theirs["weight"])
        assert torch.equal(mine["momentum"], theirs["momentum"])
    assert torch.equal(resumed[B]["weight"], before[f"layers.{B}.weight"])
    return {"momentum": resumed[B]["momentum"], "expected": 0.05 * targets[B]}


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_matrix_unused_after_a_load_keeps_what_was_loaded(ranks, sizes):
    found = agreed(ranks, sizes, unused_after_a_load)
    torch.testing.assert_close(found["momentum"], found["expected"], atol=1e-6, rtol=0)


class Branches(nn.Module):
    """Two layers with base parameters of their own, of which a forward may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
        )
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == self.skipped else x + layer(x)
        return x


def branch_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))).square().mean()


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2


def train_branches(sizes: Sizes, reshard: bool) -> None:
    model = Branches()
    settings = {"lr": 0.1, "weight_decay": 0.1, "adamw_lr": 0.01, "adamw_weight_decay": 0.1}
    oracle, reference = with_oracle(model, is_matrix, **settings)
    optimizer = build(model, sizes, predicate=is_matrix, reshard=reshard, **settings)
    mine, replicas = data_rank(sizes)
    before = full_weights(model)
    for step, skipped in enumerate([None, 1, 0, None]):
        model.skipped = oracle.skipped = skipped
        seeds = [10 * step + rank for rank in range(replicas)]
        branch_loss(model, seeds[mine]).backward()
        mean_backward(oracle, branch_loss, seeds)
        step_both(optimizer, reference)
        after = assert_weights_close(model, oracle)
        for name, weight in after.items():
            unchanged = torch.equal(weight, before[name])
            assert unchanged == (skipped is not None and name.startswith(f"layers.{skipped}.")), name
        before = after


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_layers_that_are_skipped_in_turn(ranks, sizes, reshard):
    ranks(4, train_branches, sizes, reshard)


# Frozen


def assert_moved(model: nn.Module, again: bool) -> None:
    """That this rank has moved a gather, another one in the backward of what is trained, if `again`, and a
    reduction of that.

    What goes to one owner lies together, with a count of 4 bytes for each gradient behind it; all padded.
    """
    runtime = find_runtime(model)
    here = runtime.layout.here
    expected = dict.fromkeys(("gather", "reduce", "reduce_replicas"), 0)
    for group in runtime.groups:
        counts: Counter[Any] = Counter()
        sent = []
        gathers = 1 + (again and any(param.resting.requires_grad for param in group.params))
        for param in group.params:
            nbytes = padded(4 * param.piece_shape.numel())
            if param.coordinate.shard != here.shard:
                expected["gather"] += gathers * nbytes
            if param.resting.requires_grad:
                sent.append((param.coordinate, nbytes))
                has_copies = param.tp is not None and len(param.tp.copies) > 1
                counts[param.coordinate, has_copies] += 1
        sent += [(owner, padded(4 * count)) for (owner, _), count in counts.items()]
        for owner, nbytes in sent:
            if owner.shard != here.shard:
                expected["reduce"] += nbytes
            elif owner.replicate != here.replicate:
                expected["reduce_replicas"] += nbytes
    moved = {phase: runtime.traffic.bytes.get(phase, 0) for phase in expected}
    assert moved == expected, f"{moved} instead of {expected}"


def padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class LoraLinear(nn.Module):
    """A frozen linear layer and a low-rank correction that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.lora_a = nn.Linear(4, 2, bias=False)
        self.lora_b = nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class LoraModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LoraLinear(), LoraLinear()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def lora_loss(model: nn.Module, seed: int) -> torch.Tensor:
    inputs, wanted = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    return (model(inputs) - wanted).square().mean()


def is_lora(name: str, param: nn.Parameter) -> bool:
    return "lora" in name


def train_lora(sizes: Sizes, reshard: bool) -> None:
    torch.manual_seed(1)
    model = LoraModel()
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    oracle, reference = with_oracle(model, is_lora, **SETTINGS)
    optimizer = build(model, sizes, predicate=is_lora, reshard=reshard, **SETTINGS)
    mine, replicas = data_rank(sizes)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]
    for step in range(3):
        seeds = [10 * step + rank for rank in range(replicas)]
        find_runtime(model).traffic.reset()
        lora_loss(model, seeds[mine]).backward()
        assert_moved(model, again=reshard)
        mean_backward(oracle, lora_loss, seeds)
        step_both(optimizer, reference)
        weights = assert_weights_close(model, oracle)
        assert {name: param.requires_grad for name, param in model.named_parameters()} == flags
        for name, trainable in flags.items():
            assert torch.equal(weights[name], first[name]) != trainable, name
    named = dict(model.named_parameters())
    assert {id(param) for param in optimizer.state} == {id(named[name]) for name in flags if flags[name]}
    assert all("base" not in line for line in dmuon.summary(model).splitlines())


@pytest.mark.always("dp4-while_used")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_lora_beside_frozen_weights(ranks, sizes, reshard):
    ranks(4, train_lora, sizes, reshard)


def is_the_one(name: str, param: nn.Parameter) -> bool:
    return name == "layers.1.up_proj.weight"


def train_one_matrix(sizes: Sizes, reshard: bool) -> list[int]:
    """All other weights are frozen. How many bytes of dedicated weights this rank keeps, by rank."""
    model = Transformer(depth=2)
    for name, param in model.named_parameters():
        param.requires_grad_(is_the_one(name, param))
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    oracle, reference = with_oracle(model, is_the_one, **SETTINGS)
    # The predicate chooses everything; what is frozen drops out.
    optimizer = build(model, sizes, predicate=everything, reshard=reshard, **SETTINGS)
    mine, replicas = data_rank(sizes)
    (record,) = dmuon.get_dedicated_params(model)
    for step in range(3):
        seeds = [10 * step + rank for rank in range(replicas)]
        loss_of(model, seeds[mine]).backward()
        mean_backward(oracle, loss_of, seeds)
        step_both(optimizer, reference)
        weights = assert_weights_close(model, oracle)
        for name, weight in weights.items():
            assert torch.equal(weight, first[name]) != (name == record.param_name), name
    owned = [len(dmuon.get_owned_params(model, rank)) for rank in range(4)]
    assert owned[record.owner_rank] == 1
    return owned


@pytest.mark.always("ddp4")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_only_one_matrix_is_trained(ranks, sizes, reshard):
    tp = sizes.get("tp", 1)  # the ranks of the owner row
    assert sorted(agreed(ranks, sizes, train_one_matrix, reshard)) == [0] * (4 - tp) + [1] * tp


def freeze_on_the_way(sizes: Sizes, reshard: bool, one_group: bool) -> list[dict[str, Any]]:
    """Matrix 1 is frozen between dedicate_params and Muon; matrix 2 after the first step, for one step."""
    model = InnerProducts([torch.eye(4)] * 4)
    given.distribute(model, sizes, reshard=reshard, one_group=one_group)
    never, later = model.layers[1].weight, model.layers[2].weight
    never.requires_grad_(False)
    optimizer = dmuon.Muon(model, **SETTINGS)
    found = []
    for step in range(3):
        later.requires_grad_(step != 1)
        find_runtime(model).traffic.reset()
        model([torch.eye(4)] * 4).backward()
        assert_moved(model, again=reshard)
        with_gradient = [p.grad is not None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {
                "weights": [dmuon.full_tensor(p).detach().clone() for p in model.parameters()],
                "momentum": momentum_of(optimizer, find_runtime(model).record_of(later)),
                "gradients": with_gradient,
            }
        )
    assert never not in optimizer.state
    return found


@pytest.mark.always("hsdp2x2-while_used-one_group", "ddp2-tp2-a_group_each")
@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_matrices_that_are_frozen_on_the_way(ranks, sizes, reshard, one_group):
    steps = agreed(ranks, sizes, freeze_on_the_way, reshard, one_group)
    for step, trained in zip(steps, [[0, 2, 3], [0, 3], [0, 2, 3]], strict=True):
        assert step["gradients"] == [index in trained for index in range(4)]
        assert torch.equal(step["weights"][1], torch.eye(4))
    first, frozen, last = (step["weights"][2] for step in steps)
    assert torch.equal(frozen, first)
    assert torch.equal(steps[1]["momentum"], steps[0]["momentum"])
    torch.testing.assert_close(last, 0.99 * first - 0.1 * 0.765439 * torch.eye(4), atol=1e-6, rtol=0)


FROZEN = [  # by step
    [],
    ["layers.0.0.weight", "layers.1.2.weight"],
    ["layers.0.0.weight", "layers.0.0.bias", "layers.0.2.weight", "layers.0.2.bias"],
    [],
]


def freeze_while_accumulating(sizes: Sizes, reshard: bool, synced: bool) -> None:
    """Matrices, and base parameters, of a layer that then has none left, between the steps."""
    torch.manual_seed(1)
    model = Branches()
    settings = {"lr": 0.1, "weight_decay": 0.1, "adamw_lr": 0.01, "adamw_weight_decay": 0.1}
    oracle, reference = with_oracle(model, is_matrix, **settings)
    optimizer = build(model, sizes, predicate=is_matrix, reshard=reshard, **settings)
    mine, replicas = data_rank(sizes)
    before = full_weights(model)
    for step, frozen in enumerate(FROZEN):
        for one in (model, oracle):
            for name, param in one.named_parameters():
                param.requires_grad_(name not in frozen)
        for micro in range(3):
            seeds = [100 * step + 10 * micro + rank for rank in range(replicas)]
            with dmuon.no_sync(model) if micro < 2 and not synced else contextlib.nullcontext():
                branch_loss(model, seeds[mine]).backward()
            mean_backward(oracle, branch_loss, seeds)
        step_both(optimizer, reference)
        after = assert_weights_close(model, oracle)
        for name, weight in after.items():
            assert torch.equal(weight, before[name]) == (name in frozen), name
        before = after


@pytest.mark.always("hsdp2x2-while_used-no_sync", "ddp2-tp2-synced")
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "no_sync"])
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_freezing_and_unfreezing_with_accumulation(ranks, sizes, reshard, synced):
    ranks(4, freeze_while_accumulating, sizes, reshard, synced)
