"""Parameter groups, their settings and what changes them: schedulers, loads, the user."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim import lr_scheduler

import dmuon
from layouts import LAYOUTS, RESIDENCIES, Sizes, build, dedicate_on, distribute, replicas_of, shard
from models import InnerProducts, Transformer, agreed, loss_of
from targets import assert_histories_close, random_targets, train_on_targets, train_oracle

pytestmark = pytest.mark.always("dp4", "ddp2-tp2")

MESHES = [pytest.param({"dp": 4}, id="fsdp"), pytest.param({"replicate": 2, "shard": 2}, id="hsdp")]
DP2: Sizes = {"dp": 2}
ORTHOGONAL = 0.765439  # what Newton-Schulz makes of the four singular values of a 4x4 identity
MATRICES = ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
BASE = "layers.3.weight"  # the layer that AdamW has


class Identities:
    """Four 4x4 layers, the last of them a base one, whose gradient is always the identity.

    So a step moves the diagonals by the learning rate, times `ORTHOGONAL` for Muon, and nothing else.
    """

    def __init__(self, sizes: Sizes, groups: Any = None, *, reshard: bool = True, **muon: Any) -> None:
        self.model = InnerProducts([torch.eye(4)] * 4)
        distribute(self.model, sizes, predicate=is_no_base, reshard=reshard)
        assert [record.param_name for record in dmuon.get_dedicated_params(self.model)] == MATRICES
        self.optimizer = dmuon.Muon(self.model, param_groups=groups, **muon)

    def loss(self) -> torch.Tensor:
        return self.model([torch.eye(4)] * 4)

    def diagonals(self) -> list[float]:
        values = []
        for param in self.model.parameters():
            whole = dmuon.full_tensor(param).detach()
            diagonal = whole.diagonal()
            assert (diagonal - diagonal[0]).abs().max() < 1e-6
            assert (whole - torch.diag(diagonal)).abs().max() < 1e-6
            values.append(diagonal[0].item())
        return values

    def step(self) -> list[float]:
        """How far each layer's diagonal went down in one step."""
        before = self.diagonals()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [old - new for old, new in zip(before, self.diagonals(), strict=True)]

    def names(self) -> list[list[str]]:
        """The names in each group."""
        by_id = {id(param): name for name, param in self.model.named_parameters()}
        return [[by_id[id(param)] for param in group["params"]] for group in self.optimizer.param_groups]


def is_no_base(name: str, param: nn.Parameter) -> bool:
    return name != BASE


def assert_moved(found: list[float], muon: list[float], adamw: float) -> None:
    """Learning rates of the three Muon layers and of the AdamW layer, as the last step used them."""
    expected = [lr * ORTHOGONAL for lr in muon] + [adamw]
    assert found == pytest.approx(expected, abs=1e-6)


# How groups are given


def groups_of_every_form(sizes: Sizes) -> list[list[list[str]]]:
    """The same groups, named in every way that is allowed."""
    first, _, third, base = [*MATRICES, BASE]

    def forms(named: dict[str, nn.Parameter]) -> list[Any]:
        return [
            [{"params": [first, third]}, {"params": base}],
            [{"params": [named[first], named[third]]}, {"params": named[base]}],
            [{"params": [(first, named[first]), third]}, {"params": [named[base]]}],
            [{"params": (named[n] for n in (first, third))}, {"params": (n for n in [base])}],
            (group for group in [{"params": [first, third]}, {"params": [base]}]),
            ({"params": filter(lambda item: item[0] in (first, third), named.items())}, {"params": [base]}),
        ]

    mesh = Identities(sizes)
    named = dict(mesh.model.named_parameters())
    found = []
    for groups in forms(named):
        mesh.optimizer = dmuon.Muon(mesh.model, param_groups=groups)
        found.append(mesh.names())
        algorithms = [group["algorithm"] for group in mesh.optimizer.param_groups]
        assert algorithms == ["muon", "adamw", "muon"]
    return found


def test_parameters_by_name_object_pair_or_generator(ranks):
    for found in agreed(ranks, DP2, groups_of_every_form):
        assert found == [[MATRICES[0], MATRICES[2]], [BASE], [MATRICES[1]]]  # the unlisted one comes last


def default_groups(sizes: Sizes) -> list[tuple[str, list[str], float]]:
    model = Transformer(depth=1)
    model.layers[0].norm2.bias.requires_grad_(False)
    optimizer = build(model, sizes, lr=0.3, adamw_lr=0.4)
    names = {id(param): name for name, param in model.named_parameters()}
    return [(g["algorithm"], [names[id(p)] for p in g["params"]], g["lr"]) for g in optimizer.param_groups]


def test_without_groups_there_is_one_of_each_algorithm(ranks):
    muon, adamw = agreed(ranks, DP2, default_groups)
    every = [name for name, _ in Transformer(depth=1).named_parameters()]
    matrices = [name for name in every if name.endswith("_proj.weight")]
    assert muon == ("muon", matrices, 0.3)
    rest = [name for name in every if name not in matrices and name != "layers.0.norm2.bias"]
    assert adamw == ("adamw", rest, 0.4)


# Settings of their own


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_each_group_trains_by_its_own_settings(ranks, sizes):
    weights = [torch.randn(size) for size in [(5, 3), (3, 5), (4, 4), (6, 2)]]
    targets = random_targets(weights, steps=3, ranks=replicas_of(sizes))
    settings = [
        ({}, {}),
        (
            {"lr": 0.03, "momentum": 0.5, "nesterov": False, "weight_decay": 0.3},
            {"lr": 0.03, "momentum": 0.5, "nesterov": False, "weight_decay": 0.3},
        ),
        (
            {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "maximize": True},
            {"scale": "match_rms_adamw", "ns_steps": 3, "maximize": True},
        ),
        (
            {"ns_coefficients": [(2.0, -1.5, 0.5)], "momentum": 0.0, "adjust_lr_fn": "none"},
            {"coefficients": (2.0, -1.5, 0.5), "momentum": 0.0, "scale": "none"},
        ),
    ]
    groups = [{"params": f"layers.{i}.weight", **own} for i, (own, _) in enumerate(settings) if own]
    common = {"lr": 0.1, "weight_decay": 0.1}
    history = agreed(ranks, sizes, train_on_targets, weights, targets, param_groups=groups, **common)
    for index, (_, own) in enumerate(settings):
        alone = [[[by_weight[index]] for by_weight in by_rank] for by_rank in targets]
        expected = train_oracle([weights[index]], alone, **{**common, **own})
        assert_histories_close([[step[index]] for step in history], expected)


def zero_settings(sizes: Sizes) -> list[list[float]]:
    groups = [
        {"params": MATRICES[0], "lr": 0.0},
        {"params": MATRICES[1], "weight_decay": 0.0},
        {"params": MATRICES[2], "lr": 0.0, "momentum": 0.0},
        {"params": BASE, "lr": 0.0, "betas": (0.0, 0.0)},
    ]
    settings = {"lr": 0.02, "weight_decay": 0.5, "adamw_lr": 0.1, "adamw_weight_decay": 0.5}
    trained = Identities(sizes, groups, **settings)
    untouched = trained.step()
    for group in trained.optimizer.param_groups[:3]:
        group["lr"] = 0.1
    trained.optimizer.param_groups[3].update(lr=0.1, weight_decay=0.0)
    return [untouched, trained.step()]


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_zero_is_a_setting_and_not_a_default(ranks, sizes):
    untouched, moved = agreed(ranks, sizes, zero_settings)
    assert untouched[0] == untouched[2] == untouched[3] == 0
    assert untouched[1] == pytest.approx(0.02 * ORTHOGONAL, abs=1e-6)
    # 0.05 is the decay, in the groups that have one, of a diagonal that is still one.
    assert moved[0] == moved[2] == pytest.approx(0.1 * ORTHOGONAL + 0.05, abs=1e-6)
    assert moved[1] == pytest.approx(0.1 * ORTHOGONAL, abs=1e-6)
    assert moved[3] == pytest.approx(0.1, abs=1e-6)


def tensor_lr(sizes: Sizes, as_tensor: bool) -> list[list[float]]:
    rates = [0.02, 0.001, 0.05]
    if as_tensor:
        rates = [torch.tensor(rate) for rate in rates]
    groups = [{"params": MATRICES[1], "lr": rates[2]}]
    trained = Identities(sizes, groups, lr=rates[0], adamw_lr=rates[1])
    scheduler = lr_scheduler.LambdaLR(trained.optimizer, lambda epoch: 0.5**epoch)
    moved = [trained.step()]
    scheduler.step()
    moved.append(trained.step())
    for group in trained.optimizer.param_groups:
        if as_tensor:
            assert isinstance(group["lr"], torch.Tensor)
            group["lr"].fill_(0.2)
        else:
            group["lr"] = 0.2
    moved.append(trained.step())
    return moved


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("sizes", MESHES)
def test_learning_rate_may_be_a_tensor(ranks, sizes, as_tensor):
    first, halved, filled = agreed(ranks, sizes, tensor_lr, as_tensor)
    assert_moved(first, [0.02, 0.05, 0.02], 0.001)
    assert_moved(halved, [0.01, 0.025, 0.01], 0.0005)
    assert_moved(filled, [0.2, 0.2, 0.2], 0.2)


# Schedulers


def schedule_three_groups(sizes: Sizes, reshard: bool) -> dict[str, list]:
    groups = [
        {"params": MATRICES[:2], "lr": 0.02, "weight_decay": 0.1},
        {"params": [BASE], "lr": 0.001},
        {"params": [MATRICES[2]], "lr": 0.02, "weight_decay": 0.0},
    ]
    trained = Identities(sizes, groups, reshard=reshard, weight_decay=0.7)
    scheduler = lr_scheduler.LambdaLR(trained.optimizer, lambda epoch: 0.5**epoch)
    decays = [group.get("weight_decay") for group in trained.optimizer.param_groups]
    rates, moved = [], []

    def record() -> None:
        rates.append([group["lr"] for group in trained.optimizer.param_groups])
        before = trained.diagonals()
        moved.append((before, trained.step()))

    record()
    scheduler.step()
    record()
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    record()  # a load brings the rate it was saved with
    scheduler.step()
    record()  # and the scheduler still acts
    return {"rates": rates, "moved": moved, "decays": decays}


@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_a_scheduler_acts_on_every_group_and_after_a_load(ranks, sizes, reshard):
    found = agreed(ranks, sizes, schedule_three_groups, reshard)
    assert found["decays"] == [0.1, 0.0, 0.0]
    factors = [1, 0.5, 0.5, 0.25]
    assert found["rates"] == [[0.02 * f, 0.001 * f, 0.02 * f] for f in factors]
    for factor, (before, moved) in zip(factors, found["moved"], strict=True):
        lr = 0.02 * factor
        expected = [lr * ORTHOGONAL + lr * decay * w for decay, w in zip((0.1, 0.1, 0), before, strict=False)]
        assert moved == pytest.approx([*expected, 0.001 * factor], abs=1e-6)


def warmup_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warmup_cosine": warmup_cosine,
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 4], gamma=0.1),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[0.3, 0.05, 0.2], total_steps=8, cycle_momentum=False
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "by_group": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 1 / (1 + e), lambda e: 1.0, lambda e: 0.5**e]),
}


def rates_under(sizes: Sizes, name: str) -> list[tuple[list[float], list[float], list[float]]]:
    """By step: our groups' rates, those of a plain SGD under the same scheduler, and what moved."""
    groups = [{"params": MATRICES[:2], "lr": 0.02}, {"params": BASE, "lr": 0.001}]
    trained = Identities(sizes, groups, lr=0.1)
    plain = torch.optim.SGD(
        [{"params": torch.zeros(1), "lr": group["lr"]} for group in trained.optimizer.param_groups]
    )
    schedulers = [SCHEDULERS[name](trained.optimizer), SCHEDULERS[name](plain)]
    found = []
    for _ in range(6):
        rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in (trained.optimizer, plain)
        ]
        found.append((*rates, trained.step()))
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers(ranks, name):
    steps = agreed(ranks, DP2, rates_under, name)
    for rates, plain, moved in steps:
        assert rates == plain
        assert_moved(moved, [rates[0], rates[0], rates[2]], rates[1])
    assert len({tuple(rates) for rates, _, _ in steps}) > 1


# Closures


def train_by_closure(sizes: Sizes, closed: bool) -> dict[str, Any]:
    model = Transformer(depth=1)
    optimizer = build(model, sizes)
    losses = []
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seed=step)
            loss.backward()
            return loss

        if closed:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            assert optimizer.step() is None
        losses.append(loss.item())
    return {"losses": losses, "weights": [dmuon.full_tensor(p).detach().clone() for p in model.parameters()]}


@pytest.mark.parametrize("sizes", MESHES)
def test_a_closure_is_run_with_gradients_and_its_loss_returned(ranks, sizes):
    closed = agreed(ranks, sizes, train_by_closure, True)
    plain = agreed(ranks, sizes, train_by_closure, False)
    assert closed["losses"] == plain["losses"]
    for one, other in zip(closed["weights"], plain["weights"], strict=True):
        assert torch.equal(one, other)


# Groups that come later


def add_groups_later(sizes: Sizes) -> list[list[float]]:
    """A matrix and a base parameter that are frozen at first, and get groups of their own when they thaw."""
    trained = Identities(sizes)
    named = dict(trained.model.named_parameters())
    late = [named[MATRICES[1]], named[BASE]]
    for param in late:
        param.requires_grad_(False)
    trained.optimizer = dmuon.Muon(trained.model)
    moved = [trained.step()]
    for param in late:
        param.requires_grad_(True)
    trained.optimizer.add_param_group({"params": MATRICES[1], "lr": 0.05})
    trained.optimizer.add_param_group({"params": [named[BASE]], "lr": 0.003})
    assert [group["algorithm"] for group in trained.optimizer.param_groups] == ["muon", "muon", "adamw"]
    moved.append(trained.step())
    return moved


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_groups_may_be_added_later(ranks, sizes):
    before, after = agreed(ranks, sizes, add_groups_later)
    assert_moved(before, [0.02, 0, 0.02], 0)
    assert_moved(after, [0.02, 0.05, 0.02], 0.003)


# Refusals

NAN, INF = float("nan"), float("inf")
# What is wrong, and words that the message must have.
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr"),
    ({"lr": NAN}, "lr"),
    ({"lr": INF}, "lr"),
    ({"lr": "fast"}, "lr"),
    ({"lr": None}, "lr"),
    ({"lr": torch.tensor([0.1, 0.2])}, "lr"),
    ({"lr": torch.tensor(-0.1)}, "lr"),
    ({"momentum": 1.0}, "momentum"),
    ({"momentum": -0.1}, "momentum"),
    ({"momentum": NAN}, "momentum"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"weight_decay": INF}, "weight_decay"),
    ({"ns_steps": 0}, "steps"),
    ({"ns_steps": -1}, "steps"),
    ({"ns_steps": 2.5}, "steps"),
    ({"ns_steps": 6, "ns_coefficients": "you"}, "steps"),
    ({"ns_steps": 3, "ns_coefficients": [(2.0, -1.5, 0.5)] * 2}, "steps"),
    ({"ns_coefficients": "cubic"}, "cubic"),
    ({"ns_coefficients": []}, "coefficients"),
    ({"ns_coefficients": (1.0, 2.0)}, "coefficients"),
    ({"ns_coefficients": [(1.0, 2.0, NAN)]}, "coefficients"),
    ({"ns_coefficients": None}, "coefficients"),
    ({"ns_dtype": torch.int32}, "ns_dtype"),
    ({"ns_dtype": "bf16"}, "ns_dtype"),
    ({"ns_algorithm": "fast"}, "ns_algorithm"),
    ({"adjust_lr_fn": "rms"}, "adjust_lr_fn"),
]
BAD_ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"adamw_lr": -0.1}, "AdamW"),
    ({"adamw_lr": NAN}, "AdamW"),
    ({"adamw_lr": None}, "AdamW"),
    ({"adamw_betas": (1.0, 0.9)}, "AdamW"),
    ({"adamw_betas": (0.9, -0.1)}, "AdamW"),
    ({"adamw_betas": 0.9}, "AdamW"),
    ({"adamw_eps": -1e-8}, "AdamW"),
    ({"adamw_weight_decay": -0.1}, "AdamW"),
    ({"momentum_dtype": torch.int64}, "momentum_dtype"),
    ({"param_groups": {"params": MATRICES}}, "param_groups"),
    ({"param_groups": [MATRICES]}, "params"),
    ({"param_groups": [{"lr": 0.1}]}, "params"),
    ({"param_groups": [{"params": ["layers.9.weight"]}]}, "layers.9.weight"),
    ({"param_groups": [{"params": [3]}]}, "param_groups"),
    ({"param_groups": [{"params": MATRICES[0], "lr_scale": 2}]}, "lr_scale"),
    ({"param_groups": [{"params": BASE, "momentum": 0.9}]}, "momentum"),
    ({"param_groups": [{"params": MATRICES[0], "betas": (0.9, 0.9)}]}, "betas"),
    ({"param_groups": [{"params": BASE, "betas": (0.9, 2.0)}]}, "AdamW"),
    ({"param_groups": [{"params": BASE, "lr": -1.0}]}, "AdamW"),
    ({"param_groups": [{"params": [BASE, MATRICES[0]]}]}, MATRICES[0]),
    ({"param_groups": [{"params": MATRICES[:2]}, {"params": MATRICES[1:]}]}, "more than one parameter group"),
]
IN_GROUPS = [({"param_groups": [{"params": MATRICES[1], **own}]}, word) for own, word in BAD_SETTINGS]
REFUSED = [*BAD_SETTINGS, *IN_GROUPS, *BAD_ELSEWHERE]


def refuse(sizes: Sizes) -> list[str]:
    """The kind of exception and the message of every bad setting; a good optimizer can be made afterwards."""
    trained = Identities(sizes)
    messages = []
    for settings, _ in REFUSED:
        try:
            dmuon.Muon(trained.model, **settings)
            messages.append("accepted")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    trained.optimizer = dmuon.Muon(trained.model)
    assert_moved(trained.step(), [0.02] * 3, 0.001)
    return messages


def test_bad_settings_are_refused_by_name(ranks):
    wrong = [
        f"{settings}: {message}"
        for (settings, word), message in zip(REFUSED, agreed(ranks, DP2, refuse), strict=True)
        if not (message.startswith("ValueError: ") and word in message)
    ]
    assert not wrong, "\n".join(wrong)


def stale_parameters(sizes: Sizes) -> list[str]:
    """Parameters collected too early: before dedicate_params, and before fully_shard."""
    model = InnerProducts([torch.eye(4)] * 4)
    oldest = list(model.parameters())
    mesh = dedicate_on(model, sizes, predicate=is_no_base)
    older = list(model.parameters())
    shard(model, mesh)
    messages = []
    for params in (oldest[:1], older[3:], [nn.Parameter(torch.zeros(2))]):
        with pytest.raises(ValueError, match="not one of the model's parameters") as error:
            dmuon.Muon(model, param_groups=[{"params": params}])
        messages.append(str(error.value))
    # The dedicated ones are the same before and after fully_shard.
    dmuon.Muon(model, param_groups=[{"params": older[:3]}])
    return messages


def test_parameters_that_were_collected_too_early(ranks):
    for message in agreed(ranks, DP2, stale_parameters):
        assert "fully_shard" in message
        assert "name" in message


def cycled(sizes: Sizes, name: str) -> list[dict[str, float]]:
    """torch's schedulers that turn the momentum as well, with their own defaults; and a resumed one."""
    model = InnerProducts([torch.eye(4)] * 4)
    mesh = dedicate_on(model, sizes, predicate=is_no_base)
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    if name == "OneCycleLR":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.001], total_steps=6)
    else:
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, [0.002, 0.0001], [0.02, 0.001], 3)
    seen = []
    for _ in range(3):
        model([torch.eye(4)] * 4).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    return seen


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_may_turn_the_momentum(ranks, name):
    seen = agreed(ranks, DP2, cycled, name)
    assert len({setting["momentum"] for setting in seen}) == 3
    assert all(0.8 <= setting["momentum"] <= 0.95 for setting in seen)
    assert len({setting["lr"] for setting in seen}) == 3


def added_too_late(sizes: Sizes) -> str:
    """A parameter that the model did not have when the optimizer was built: nothing averages its gradient."""
    model = InnerProducts([torch.eye(4)] * 4)
    mesh = dedicate_on(model, sizes, predicate=is_no_base)
    shard(model, mesh)
    optimizer = dmuon.Muon(model)
    model.adapter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="not one of the model's parameters") as error:
        optimizer.add_param_group({"params": ["adapter"]})
    return str(error.value)


def test_a_parameter_that_came_after_the_optimizer_is_refused(ranks):
    assert "shape (2,)" in agreed(ranks, DP2, added_too_late)


def settings_spoiled_later(sizes: Sizes) -> list[str]:
    """A setting that becomes nonsense between steps is refused by the next step, which changes nothing."""
    trained = Identities(sizes)
    trained.step()
    before = trained.diagonals()
    messages = []
    for key, value in [("lr", NAN), ("momentum", 1.5), ("adjust_lr_fn", "rms"), ("ns_steps", 0)]:
        group = trained.optimizer.param_groups[0]
        good, group[key] = group[key], value
        trained.loss().backward()
        with pytest.raises(ValueError, match=key.removeprefix("ns_")) as error:
            trained.optimizer.step()
        messages.append(str(error.value))
        trained.optimizer.zero_grad()
        group[key] = good
    assert trained.diagonals() == before
    return messages


def test_a_setting_spoiled_between_steps_is_refused_by_the_step(ranks):
    assert len(agreed(ranks, DP2, settings_spoiled_later)) == 4
