"""Parameters without a gradient: unused in a step, on all ranks or on some, or frozen for good."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.runtime import find_runtime
from models import (
    InnerProducts,
    Targets,
    Transformer,
    agreed,
    assert_histories_close,
    assert_weights_close,
    build,
    dedicate,
    everything,
    full_weights,
    loss_of,
    make_mesh,
    mean_backward,
    momentum_of,
    shard,
    train_on_targets,
    train_oracle,
    with_oracle,
)

LAYOUTS = [
    pytest.param((4,), True, id="fsdp-while_used"),
    pytest.param((4,), False, id="fsdp-until_backward_done"),
    pytest.param((2, 2), True, id="hsdp-while_used"),
    pytest.param((2, 2), False, id="hsdp-until_backward_done"),
]
SETTINGS = {"lr": 0.1, "weight_decay": 0.1}
WEIGHTS = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in [(4, 3), (3, 4), (5, 2)]]
A, B, C = range(3)


def targets_without(skipped: list[list[list[int]]]) -> Targets:
    """Random targets, none where `skipped[step][rank]` lists the weight."""
    rng = torch.Generator().manual_seed(2)
    return [
        [
            [None if i in absent else torch.randn(w.shape, generator=rng) for i, w in enumerate(WEIGHTS)]
            for absent in by_rank
        ]
        for by_rank in skipped
    ]


# Unused in a step


@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize(("shape", "reshard"), LAYOUTS)
def test_a_matrix_unused_on_every_rank_is_left_alone(ranks, shape, reshard, one_group):
    everybody, nobody = [[]] * 4, [[B]] * 4
    targets = targets_without([everybody, nobody, everybody, nobody, nobody])
    history = agreed(
        ranks, shape, train_on_targets, WEIGHTS, targets, reshard=reshard, one_group=one_group, **SETTINGS
    )
    assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
    for used, unused in [(0, 1), (2, 3), (2, 4)]:
        for what in ("weight", "momentum"):  # no decay, and no momentum that dies away
            assert torch.equal(history[unused][B][what], history[used][B][what])
        if not one_group:  # the group did not run at all
            assert history[unused][B]["gradient"] is None


@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_a_matrix_unused_from_the_first_step_on_waits_for_its_turn(ranks, shape, one_group):
    targets = targets_without([[[A, C]] * 4, [[A]] * 4, [[]] * 4])
    history = agreed(ranks, shape, train_on_targets, WEIGHTS, targets, one_group=one_group, **SETTINGS)
    assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
    assert torch.equal(history[1][A]["weight"], WEIGHTS[A])


@pytest.mark.parametrize(
    ("shape", "reshard", "user"), [((4,), True, 0), ((4,), False, 3), ((2, 2), True, 1), ((2, 2), False, 2)]
)
def test_a_matrix_used_on_one_rank_gets_its_share_of_the_gradient(ranks, shape, reshard, user):
    only_one = [[] if rank == user else [A, B] for rank in range(4)]
    targets = targets_without([only_one, [[B]] * 4, only_one])
    history = agreed(
        ranks, shape, train_on_targets, WEIGHTS, targets, reshard=reshard, one_group=True, **SETTINGS
    )
    torch.testing.assert_close(history[0][B]["gradient"], targets[0][user][B] / 4, atol=1e-7, rtol=1e-6)
    assert_histories_close(history, train_oracle(WEIGHTS, targets, **SETTINGS))
    assert torch.equal(history[1][B]["weight"], history[0][B]["weight"])


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


def train_branches(shape: tuple[int, ...], reshard: bool) -> None:
    model = Branches()
    settings = {"lr": 0.1, "weight_decay": 0.1, "adamw_lr": 0.01, "adamw_weight_decay": 0.1}
    oracle, reference = with_oracle(model, is_matrix, **settings)
    optimizer = build(model, make_mesh(shape), predicate=is_matrix, reshard_after_forward=reshard, **settings)
    before = full_weights(model)
    for step, skipped in enumerate([None, 1, 0, None]):
        model.skipped = oracle.skipped = skipped
        seeds = [10 * step + rank for rank in range(4)]
        branch_loss(model, seeds[dist.get_rank()]).backward()
        mean_backward(oracle, branch_loss, seeds)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        after = assert_weights_close(model, oracle)
        for name, weight in after.items():
            unchanged = torch.equal(weight, before[name])
            assert unchanged == (skipped is not None and name.startswith(f"layers.{skipped}.")), name
        before = after


@pytest.mark.parametrize(("shape", "reshard"), LAYOUTS)
def test_layers_that_are_skipped_in_turn(ranks, shape, reshard):
    ranks(4, train_branches, shape, reshard)


# Frozen


def traffic_of_a_step(model: nn.Module, loss: torch.Tensor) -> dict[str, int]:
    """Bytes that the forward before `loss` and its backward moved, by phase, on all ranks together."""
    loss.backward()
    moved = find_runtime(model).traffic.bytes
    phases = ["gather", "reduce", "reduce_replicas"]
    total = torch.tensor([moved.get(phase, 0) for phase in phases])
    dist.all_reduce(total)
    return dict(zip(phases, total.tolist(), strict=True))


class LoraLinear(nn.Module):
    """A frozen linear layer and a low-rank correction that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, 4))
        self.lora_b = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


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


def train_lora(shape: tuple[int, ...], reshard: bool) -> dict[str, int]:
    model = LoraModel()
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    oracle, reference = with_oracle(model, is_lora, **SETTINGS)
    optimizer = build(model, make_mesh(shape), predicate=is_lora, reshard_after_forward=reshard, **SETTINGS)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]
    moved: dict[str, int] = {}
    for step in range(3):
        seeds = [10 * step + rank for rank in range(4)]
        find_runtime(model).traffic.reset()
        moved = traffic_of_a_step(model, lora_loss(model, seeds[dist.get_rank()]))
        mean_backward(oracle, lora_loss, seeds)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        weights = assert_weights_close(model, oracle)
        assert {name: param.requires_grad for name, param in model.named_parameters()} == flags
        for name, trainable in flags.items():
            assert torch.equal(weights[name], first[name]) != trainable, name
    named = dict(model.named_parameters())
    assert {id(param) for param in optimizer.state} == {id(named[name]) for name in flags if flags[name]}
    assert all("base" not in line for line in dmuon.summary(model).splitlines())
    return moved


@pytest.mark.parametrize(("shape", "reshard"), LAYOUTS)
def test_lora_beside_frozen_weights(ranks, shape, reshard):
    moved = agreed(ranks, shape, train_lora, reshard)
    # Four matrices of 32 bytes; each one's gradient has a count of 4 bytes with it.
    rows, receivers = (1, 3) if shape == (4,) else (2, 1)
    assert moved["gather"] == rows * receivers * 4 * 32 * (2 if reshard else 1)
    assert moved["reduce"] == rows * receivers * 4 * (32 + 4)
    assert moved["reduce_replicas"] == (rows - 1) * 4 * (32 + 4)


def is_the_one(name: str, param: nn.Parameter) -> bool:
    return name == "layers.1.up_proj.weight"


def train_one_matrix(shape: tuple[int, ...], reshard: bool) -> list[int]:
    """All other weights are frozen. How many bytes of dedicated weights this rank keeps, by rank."""
    model = Transformer(depth=2)
    for name, param in model.named_parameters():
        param.requires_grad_(is_the_one(name, param))
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    oracle, reference = with_oracle(model, is_the_one, **SETTINGS)
    # The predicate chooses everything; what is frozen drops out.
    optimizer = build(
        model, make_mesh(shape), predicate=everything, reshard_after_forward=reshard, **SETTINGS
    )
    (record,) = dmuon.get_dedicated_params(model)
    for step in range(3):
        seeds = [10 * step + rank for rank in range(4)]
        loss_of(model, seeds[dist.get_rank()]).backward()
        mean_backward(oracle, loss_of, seeds)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        weights = assert_weights_close(model, oracle)
        for name, weight in weights.items():
            assert torch.equal(weight, first[name]) != (name == record.param_name), name
    owned = [len(dmuon.get_owned_params(model, rank)) for rank in range(4)]
    assert owned[record.owner_rank] == 1
    return owned


@pytest.mark.parametrize(("shape", "reshard"), LAYOUTS)
def test_only_one_matrix_is_trained(ranks, shape, reshard):
    assert sorted(agreed(ranks, shape, train_one_matrix, reshard)) == [0, 0, 0, 1]


def freeze_on_the_way(shape: tuple[int, ...], reshard: bool, one_group: bool) -> list[dict[str, Any]]:
    """Matrix 1 is frozen between dedicate_params and Muon; matrix 2 after the first step, for one step."""
    model, mesh = InnerProducts([torch.eye(4)] * 4), make_mesh(shape)
    dedicate(model, mesh, predicate=everything, reshard_after_forward=reshard)
    never, later = model.layers[1].weight, model.layers[2].weight
    never.requires_grad_(False)
    if one_group:
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    else:
        shard(model, mesh, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, **SETTINGS)
    found = []
    for step in range(3):
        later.requires_grad_(step != 1)
        find_runtime(model).traffic.reset()
        moved = traffic_of_a_step(model, model([torch.eye(4)] * 4))
        with_gradient = [p.grad is not None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {
                "weights": [dmuon.full_tensor(p).detach().clone() for p in model.parameters()],
                "momentum": momentum_of(optimizer, later),
                "gradients": with_gradient,
                "moved": moved,
            }
        )
    assert never not in optimizer.state
    return found


@pytest.mark.parametrize("one_group", [False, True], ids=["a_group_each", "one_group"])
@pytest.mark.parametrize(("shape", "reshard"), LAYOUTS)
def test_matrices_that_are_frozen_on_the_way(ranks, shape, reshard, one_group):
    steps = agreed(ranks, shape, freeze_on_the_way, reshard, one_group)
    receivers = 3 if shape == (4,) else 2
    for step, trained in zip(steps, [[0, 2, 3], [0, 3], [0, 2, 3]], strict=True):
        assert step["gradients"] == [index in trained for index in range(4)]
        assert step["moved"]["reduce"] == receivers * len(trained) * (64 + 4)
        assert torch.equal(step["weights"][1], torch.eye(4))
    first, frozen, last = (step["weights"][2] for step in steps)
    assert torch.equal(frozen, first)
    assert torch.equal(steps[1]["momentum"], steps[0]["momentum"])
    torch.testing.assert_close(last, 0.99 * first - 0.1 * 0.765439 * torch.eye(4), atol=1e-6, rtol=0)
