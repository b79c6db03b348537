"""The engine under loops that are not the plain one: what is used, skipped, repeated, raised."""

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.engine import fsdp
from dmuon.engine.runtime import find_runtime
from layouts import FEWER, LAYOUTS, RESIDENCIES, Sizes, build, dedicate_on, distribute
from models import (
    Transformer,
    agreed,
    assert_weights_close,
    backward_both,
    dedicate,
    full_weights,
    is_proj,
    loss_of,
    make_mesh,
    mean_backward,
    seeds_of,
    shard,
    step_both,
    with_oracle,
)
from reference import ReferenceMuon

pytestmark = pytest.mark.always("dp4", "ddp2-tp2", "(4,)-True", "(2, 2)-False")

# zero_grad between two backwards


def drop_first_gradient(sizes: Sizes, reshard: bool) -> None:
    model = Transformer()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step, how in enumerate(["optimizer", "model", "by hand"]):
        loss_of(model, 77 + step).backward()  # a step that is skipped: it must leave no trace
        if how == "optimizer":
            optimizer.zero_grad()
        elif how == "model":
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        assert all(p.grad is None for p in model.parameters())
        backward_both(model, oracle, step)
        for record in dmuon.get_dedicated_params(model):
            expected = dict(oracle.named_parameters())[record.param_name].grad
            if record.is_owner:
                torch.testing.assert_close(record.local_gradient(), expected, atol=1e-6, rtol=0)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("hsdp2x1-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_dropped_gradients_leave_no_trace(ranks, sizes, reshard):
    ranks(4, drop_first_gradient, sizes, reshard)


# Accumulation


def accumulate(sizes: Sizes, reshard: bool) -> None:
    model = Transformer()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step in range(3):
        for micro in range(3):
            backward_both(model, oracle, 10 * step + micro)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("ddp4")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_gradients_of_several_backwards_add_up(ranks, sizes, reshard):
    ranks(4, accumulate, sizes, reshard)


def several_forwards_first(sizes: Sizes, reshard: bool) -> None:
    model = Transformer()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step in range(2):
        (rank, first), (_, second) = seeds_of(model, 2 * step), seeds_of(model, 2 * step + 1)
        losses = [loss_of(model, first[rank]), loss_of(model, second[rank])]
        with torch.no_grad():
            loss_of(model, 5)  # an evaluation in between
        losses[0].backward()
        losses[1].backward()
        mean_backward(oracle, loss_of, first)
        mean_backward(oracle, loss_of, second)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_several_forwards_before_their_backwards(ranks, sizes, reshard):
    ranks(4, several_forwards_first, sizes, reshard)


# Modules used twice, skipped, or in another order


class Routed(nn.Module):
    """Layers run in the order it is told; outputs may be nested."""

    def __init__(self, depth: int = 4, width: int = 6, wrap: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, wrap) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = x + self.layers[index].unwrap(self.layers[index](x))
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, width: int, wrap: Any) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * width + 1, bias=False)
        self.out_proj = nn.Linear(2 * width + 1, width)
        self.wrap = wrap or "tensor"

    def forward(self, x: torch.Tensor) -> Any:
        y = self.out_proj(torch.tanh(self.in_proj(x)))
        return WRAPPINGS[self.wrap][0](y)

    def unwrap(self, output: Any) -> torch.Tensor:
        return WRAPPINGS[self.wrap][1](output)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: str = ""


class Plain:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.parts = {"hidden": [hidden]}


WRAPPINGS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda y: y, lambda o: o),
    "nested": (lambda y: {"h": [y, None]}, lambda o: o["h"][0]),
    "dataclass": (lambda y: Output(y, "note"), lambda o: o.hidden),
    "object": (Plain, lambda o: o.parts["hidden"][0]),
    "closure": (lambda y: lambda: y, lambda o: o()),  # nothing can be seen in there
}


def routed_loss(order: list[int]) -> Any:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        return model(x, order).square().mean()

    return loss


def run_orders(sizes: Sizes, reshard: bool, orders: list[list[int]], **kwargs: Any) -> None:
    model = Routed(**kwargs)
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    for step, order in enumerate(orders):
        backward_both(model, oracle, step, routed_loss(order))
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("hsdp2x2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_layers_used_twice_in_one_forward(ranks, sizes, reshard):
    ranks(4, run_orders, sizes, reshard, [[0, 1, 0, 2, 3, 3], [0, 0, 1, 2, 3], [3, 2, 1, 0, 1, 2, 3]])


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_layers_skipped_and_used_again(ranks, sizes, reshard):
    # What was prefetched after the last order is skipped, goes old by the step, and is used again.
    orders = [[0, 1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [1, 2, 3], [3], [0, 1, 2, 3], [2, 1, 0], [3, 0]]
    ranks(4, run_orders, sizes, reshard, orders)


@pytest.mark.always("dp4")
@pytest.mark.parametrize("wrap", ["nested", "dataclass", "object", "closure"])
@pytest.mark.parametrize(("sizes", "reshard"), FEWER)
def test_outputs_of_any_kind(ranks, sizes, reshard, wrap):
    ranks(4, run_orders, sizes, reshard, [[0, 1, 2, 3], [0, 1, 1, 3]], wrap=wrap)


class Hiding(Routed):
    """Even the model's output is hidden."""

    def forward(self, x: torch.Tensor, order: list[int]) -> Any:
        y = super().forward(x, order)
        return lambda: y


def hide_everything(sizes: Sizes) -> str:
    model = Hiding(wrap="closure")
    for name, param in model.named_parameters():
        param.requires_grad_(is_proj(name, param))  # no base parameters: FSDP2's would be lost as well
    dedicate_on(model, sizes)
    optimizer = dmuon.Muon(model)
    model(torch.ones(5, 6), [0, 1])().sum().backward()
    with pytest.raises(RuntimeError, match="went unnoticed") as caught:
        optimizer.step()
    optimizer.zero_grad()
    return str(caught.value)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_backward_that_cannot_be_seen_is_an_error(ranks, sizes):
    assert "layers.0.in_proj.weight has gradients" in agreed(ranks, sizes, hide_everything)


def prefetched_then_stepped(sizes: Sizes, reshard: bool) -> None:
    model = Routed()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    backward_both(model, oracle, 0, routed_loss([0, 1, 2, 3]))
    with torch.no_grad():  # prefetches layer 1 and leaves it unused, with the weights of before the step
        model(torch.ones(2, 6), [0])
    fsdp.reshard(model)  # FSDP2 itself would go on with the base parameters of before the step
    step_both(optimizer, reference)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(x, [1, 2]), oracle(x, [1, 2]), atol=1e-5, rtol=0)


@pytest.mark.always("hsdp2x2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_prefetched_weights_are_not_used_after_a_step(ranks, sizes, reshard):
    ranks(4, prefetched_then_stepped, sizes, reshard)


def two_steps_without_forward(sizes: Sizes, asynchronous: bool) -> None:
    model = Routed()
    oracle, reference = with_oracle(model, weight_decay=0.1)
    optimizer = build(model, sizes, weight_decay=0.1, replicate_async=asynchronous)
    for step, order in enumerate([[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]):
        backward_both(model, oracle, step, routed_loss(order))
        for _ in range(2):  # the same gradient twice
            optimizer.step()
            reference.step()
        optimizer.zero_grad()
        optimizer.step()  # and a step with nothing to do
        reference.zero_grad()
        assert_weights_close(model, oracle)


@pytest.mark.always("dp4-True", "ddp2-tp2-False")
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_steps_without_a_forward_between(ranks, sizes, asynchronous):
    ranks(4, two_steps_without_forward, sizes, asynchronous)


# How long gathered weights stay


def kept_after_forward(model: nn.Module) -> dict[str, bool]:
    """By first parameter of each boundary, whether its whole weights are there for a backward to come."""
    groups = [group.params[0] for group in find_runtime(model).groups]
    return {p.param_name: p.gathered.untyped_storage().nbytes() > 0 for p in groups}


def follow_fully_shard(shape: tuple[int, ...]) -> None:
    model = Transformer()
    chosen = ("q_proj", "head")

    def predicate(name: str, param: nn.Parameter) -> bool:
        return any(part in name for part in chosen)

    oracle, reference = with_oracle(model, predicate)
    mesh = make_mesh(shape)
    dedicate(model, mesh, predicate=predicate)
    for layer, reshard in zip(model.layers, (True, False, None), strict=True):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    names = ["head.weight", *(f"layers.{i}.q_proj.weight" for i in range(3))]
    # The root keeps its weights unless it was told otherwise, the others do not.
    for step, kept in enumerate([(True, False, True, False), (False,) * 4, (False, True, False, False)]):
        if step == 1:
            model.set_reshard_after_forward(True)
        elif step == 2:
            model.layers[0].set_reshard_after_forward(False)
        mine, seeds = seeds_of(model, step)
        loss = loss_of(model, seeds[mine])
        assert kept_after_forward(model) == dict(zip(names, kept, strict=True))
        loss.backward()
        assert not any(kept_after_forward(model).values())
        mean_backward(oracle, loss_of, seeds)
        step_both(optimizer, reference)
    assert_weights_close(model, oracle)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_weights_stay_as_long_as_fully_shards(ranks, shape):
    ranks(4, follow_fully_shard, shape)


# Use that depends on the rank


class Sometimes(nn.Module):
    """Inside one layer, the second matrix is used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SometimesLayer(), SometimesLayer()])

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, use)
        return x


class SometimesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_proj = nn.Linear(5, 5, bias=False)
        self.b_proj = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(self.a_proj(x))
        return x + self.b_proj(x) if use else x


def use_on_some(sizes: Sizes, reshard: bool) -> None:
    model = Sometimes()
    oracle, reference = with_oracle(model, weight_decay=0.1)
    optimizer = build(model, sizes, reshard=reshard, weight_decay=0.1)
    for step, users in enumerate([{0}, {1, 3}, set(), {3}, {0, 1, 2, 3}, set()]):

        def loss(m: nn.Module, seed: int, users: set[int] = users) -> torch.Tensor:
            x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
            return m(x, seed % 1000 in users).square().mean()

        backward_both(model, oracle, step, loss)
        assert all(p.grad is not None for p in model.parameters())
        step_both(optimizer, reference)
        # Used nowhere: no decay and no momentum either, which the oracle's missing gradient says.
        assert_weights_close(model, oracle)


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_a_parameter_used_on_some_ranks_only(ranks, sizes, reshard):
    ranks(4, use_on_some, sizes, reshard)


# Initial weights, and weights changed by others


def different_seeds(sizes: Sizes) -> None:
    torch.manual_seed(dist.get_rank() // sizes.get("tp", 1))  # parallelize_module expects equal ones
    model = Routed()
    mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    distribute(model, sizes)
    records = dmuon.get_dedicated_params(model)
    owners: list[Any] = [None] * 4
    dist.all_gather_object(owners, mine)
    expected = {r.param_name: owners[r.owner_rank][r.param_name] for r in records}
    seen = {}
    for record in records:
        record.module.register_forward_pre_hook(
            lambda module, args, name=record.param_name: seen.update(
                {name: dmuon.full_tensor(module.weight).detach().clone()}
            )
        )
    model(torch.ones(2, 6), [0, 1, 2, 3])
    for name, weight in expected.items():
        assert torch.equal(seen[name], weight), f"{name}: the first forward does not use the owner's weight"
    weights = full_weights(model)
    for record in records:
        assert torch.equal(weights[record.param_name], expected[record.param_name])
        piece = record.piece()
        if record.keeps_weight:
            assert torch.equal(record.local, piece)


@pytest.mark.parametrize(
    "sizes",
    [*LAYOUTS, *(pytest.param({"replicate": r, "shard": 4 // r}, id=f"hsdp{r}x{4 // r}") for r in (1, 4))],
)
def test_the_owners_weights_win(ranks, sizes):
    ranks(4, different_seeds, sizes)


def change_weights(sizes: Sizes, reshard: bool) -> None:
    model = Routed()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)
    order = [0, 1, 2, 3]
    with torch.no_grad():
        model(torch.ones(2, 6), order)
    fsdp.reshard(model)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        with torch.no_grad():  # in place, after they were gathered for the evaluation
            p.mul_(0.5)
            q.mul_(0.5)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        p.data.mul_(0.5)  # and past autograd's version counter
        q.data.mul_(0.5)
    backward_both(model, oracle, 0, routed_loss(order))
    step_both(optimizer, reference)
    assert_weights_close(model, oracle)
    state = {name: torch.full_like(p, 0.1) + p for name, p in oracle.state_dict().items()}
    with torch.no_grad():
        model(torch.ones(2, 6), order)
    fsdp.reshard(model)
    for record in dmuon.get_dedicated_params(model):
        with torch.no_grad():
            oracle.get_parameter(record.param_name).copy_(state[record.param_name])
    model.load_state_dict(
        {r.param_name: state[r.param_name] for r in dmuon.get_dedicated_params(model)}, strict=False
    )
    with torch.no_grad():
        x = torch.ones(2, 6)
        torch.testing.assert_close(model(x, order), oracle(x, order), atol=1e-5, rtol=0)


@pytest.mark.always("hsdp2x1-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_weights_changed_after_an_evaluation_are_used(ranks, sizes, reshard):
    ranks(4, change_weights, sizes, reshard)


def change_between_forward_and_backward() -> str:
    model = Routed()
    optimizer = build(model, {"dp": 2})
    routed_loss([0, 1, 2, 3])(model, 0).backward()
    loss = routed_loss([0, 1, 2, 3])(model, 1)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"layers\.3 have changed between its forward and its") as caught:
        loss.backward()
    return str(caught.value)


def test_a_step_between_forward_and_backward_is_an_error(ranks):
    ranks(2, change_between_forward_and_backward)


# Exceptions


class Boom(Exception):
    pass


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


class Fragile(Routed):
    """Raises in front of the layer it is told, in forward or in backward."""

    fail: tuple[str, int] | None = None

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            if self.fail == ("forward", index):
                raise Boom
            if self.fail == ("backward", index):
                x = Fuse.apply(x)
            x = x + self.layers[index].fragile(x, self.fail == ("inside", index))
        return self.head(x)


class FragileLayer(Layer):
    fails = False

    def fragile(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        self.fails = fails
        return self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.in_proj(x))
        if self.fails:
            raise Boom
        return self.out_proj(y)


def fail_and_go_on(sizes: Sizes, reshard: bool) -> None:
    model = Fragile()
    model.layers = nn.ModuleList(FragileLayer(6, None) for _ in range(4))
    oracle, reference = with_oracle(model)
    dedicate_on(model, sizes, predicate=lambda name, p: p.ndim == 2, reshard=reshard)
    for p in (*model.parameters(), *oracle.parameters()):
        p.requires_grad_(p.ndim == 2)  # no base parameters: what FSDP2 does after an exception is its own
    reference = ReferenceMuon(oracle, lambda name, p: p.ndim == 2)
    optimizer = dmuon.Muon(model)
    loss = routed_loss([0, 1, 2, 3])
    for step, fail in enumerate(
        [None, ("forward", 2), None, ("inside", 1), ("backward", 2), None, ("backward", 1)]
    ):
        model.fail = fail
        if fail is not None:
            with pytest.raises(Boom):
                loss(model, step).backward()
            model.fail = None
            assert all(p.grad is None for p in model.parameters())
        for record in dmuon.get_dedicated_params(model):
            assert record.module.weight is record.resting
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    model.fail = ("backward", 1)
    with pytest.raises(Boom):
        loss(model, 9).backward()
    with torch.no_grad():  # an evaluation right after it
        x = torch.ones(2, 6)
        torch.testing.assert_close(model(x, [0, 1, 2, 3]), oracle(x, [0, 1, 2, 3]), atol=1e-5, rtol=0)


@pytest.mark.always("hsdp2x2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_iterations_that_raise_leave_nothing_behind(ranks, sizes, reshard):
    ranks(4, fail_and_go_on, sizes, reshard)


# Dtypes


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MixedLayer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class MixedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_proj = nn.Linear(6, 7, bias=False)
        self.b_proj = nn.Linear(7, 6, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b_proj(torch.tanh(self.a_proj(x)).double()).float()


def mixed_dtypes(sizes: Sizes, reshard: bool) -> None:
    model = Mixed()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        return m(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean()

    for step in range(3):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert p.dtype == q.dtype, name


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_each_parameter_keeps_its_own_dtype(ranks, sizes, reshard):
    ranks(4, mixed_dtypes, sizes, reshard)


def mixed_precision(shape: tuple[int, ...], explicit: bool) -> None:
    """Weights travel in bfloat16, gradients in float32; master weights stay what they are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Routed()
    mesh = make_mesh(shape)
    dedicate(model, mesh, predicate=is_proj, mp_policy=policy if explicit else None)
    shard(model, mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model)
    seen: list[torch.dtype] = []
    model.layers[0].in_proj.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    runtime = find_runtime(model)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x, [0, 1, 2, 3]).float().square().mean().backward()
    assert seen == [torch.bfloat16]
    here = runtime.layout.here
    away = sum(r.full_shape.numel() for r in runtime.params if r.coordinate.shard != here.shard)
    assert 2 * away <= runtime.traffic.bytes["gather"] <= 2 * 2.5 * away  # with resharding, most go twice
    assert 4 * away <= runtime.traffic.bytes["reduce"] <= 4 * 1.25 * away
    for record in dmuon.get_dedicated_params(model):
        assert record.resting.dtype == record.resting.grad.dtype == torch.float32
    optimizer.step()
    assert {s["momentum_buffer"].dtype for p, s in optimizer.state.items() if "momentum_buffer" in s} == {
        torch.float32
    }


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_mixed_precision_follows_fully_shard(ranks, shape, explicit):
    ranks(4, mixed_precision, shape, explicit)


class OnlyDedicated(nn.Module):
    """Nothing for FSDP2 to do: what it makes of inference mode and `.double()` is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def change_dtype(shape: tuple[int, ...]) -> None:
    model = OnlyDedicated()
    oracle = copy.deepcopy(model).double()
    dedicate(model, make_mesh(shape), predicate=lambda name, p: True)
    optimizer = dmuon.Muon(model, momentum_dtype=torch.float64)
    with torch.inference_mode():  # the first forward of all, and it must not spoil what follows
        model(torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.zero_grad()
    model.double()

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return m(x).square().mean()

    reference = ReferenceMuon(oracle, lambda name, p: True)
    for step in range(3):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle, 1e-9)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_the_model_may_change_its_dtype(ranks, shape):
    ranks(4, change_dtype, shape)


# Meta device


def from_meta(sizes: Sizes) -> None:
    with torch.device("meta"):
        model = Transformer()
    distribute(model, sizes)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            # On CPU, ranks that hold pieces of different sizes draw different amounts.
            torch.manual_seed(seed)
            nn.init.normal_(p, std=0.2)
    optimizer = dmuon.Muon(model)
    initial = full_weights(model)
    assert all(0.05 < w.std() < 0.5 for w in initial.values() if w.numel() > 20)
    oracle = Transformer()
    oracle.load_state_dict(initial)
    reference = ReferenceMuon(oracle, is_proj)
    for step in range(2):
        backward_both(model, oracle, step)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("hsdp2x1-tp2")
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_meta_initialisation(ranks, sizes):
    ranks(4, from_meta, sizes)


def meta_without_to_empty() -> None:
    with torch.device("meta"):
        model = Routed()
    dedicate(model, make_mesh((1,)), predicate=is_proj)
    with pytest.raises(RuntimeError, match=r"layers\.0\.in_proj\.weight is still on the meta device"):
        model(torch.ones(2, 6, device="meta"), [0])


def test_meta_weights_that_nobody_materialised(ranks):
    ranks(1, meta_without_to_empty)


# What stands around the step


def clip(sizes: Sizes, max_norm: float) -> None:
    model = Transformer()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    for step in range(2):
        for micro in range(2):  # clipped after each backward: the second sees the first one's result
            backward_both(model, oracle, 2 * step + micro)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm)
            torch.testing.assert_close(norm, expected, atol=1e-5, rtol=1e-5)
        for record in dmuon.get_dedicated_params(model):  # Newton-Schulz would hide a wrong scale
            if record.is_owner:
                wanted = oracle.get_parameter(record.param_name).grad
                torch.testing.assert_close(record.local_gradient(), wanted, atol=1e-6, rtol=1e-5)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("{'dp': 4}-100.0", "{'replicate': 2, 'shard': 2}-0.05")
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"replicate": 2, "shard": 2}], ids=str)
def test_torchs_own_clipping(ranks, sizes, max_norm):
    ranks(4, clip, sizes, max_norm)


def nothing_left_for_fsdp2(shape: tuple[int, ...], ignored: bool) -> None:
    model = OnlyDedicated()
    oracle, reference = with_oracle(model, lambda name, p: True)
    mesh = make_mesh(shape)
    dedicate(model, mesh, predicate=lambda name, p: True)
    kwargs = {"ignored_params": dmuon.dedicated_parameters(model)} if ignored else {}
    shard(model, mesh, **kwargs)
    optimizer = dmuon.Muon(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        return m(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean()

    for step in range(2):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_model_that_is_all_dedicated(ranks, shape, ignored):
    ranks(4, nothing_left_for_fsdp2, shape, ignored)


def two_models() -> None:
    """A generator and a critic, each with an optimizer of its own, in one backward."""
    torch.manual_seed(3)
    models = [OnlyDedicated(), OnlyDedicated()]
    oracles = copy.deepcopy(models)
    mesh = make_mesh((4,))
    optimizers, references = [], []
    for model, oracle in zip(models, oracles, strict=True):
        dedicate(model, mesh, predicate=lambda name, p: True)
        optimizers.append(dmuon.Muon(model))
        references.append(ReferenceMuon(oracle, lambda name, p: True))

    def loss(pair: list[nn.Module], seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        return pair[1](pair[0](x)).square().mean()

    for step in range(3):
        mine, seeds = seeds_of(models[0], step)
        loss(models, seeds[mine]).backward()
        mean_backward(oracles, loss, seeds)
        for which in (0, 1):
            if step != which:  # one of the two rests, and keeps its gradient for the next step
                step_both(optimizers[which], references[which])
            assert_weights_close(models[which], oracles[which])


def test_two_models_in_one_backward(ranks):
    ranks(4, two_models)


class Returns(nn.Module):
    """Layers that hand out their own weight, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returned(), Returned()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight, view = layer()
            x = torch.tanh(x @ weight) + x * view
        return x


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Sequential(nn.Linear(6, 6, bias=False))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.linear[0].weight
        return weight, weight.detach()[0]


def returned_weights(reshard: bool) -> None:
    model = Returns()
    oracle, reference = with_oracle(model, lambda name, p: True)
    dedicate(model, make_mesh((4,)), predicate=lambda name, p: True, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        return m(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean()

    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(loss(model, 7), loss(oracle, 7), atol=1e-5, rtol=0)
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("reshard", [True, False])
def test_layers_that_return_their_weights(ranks, reshard):
    ranks(4, returned_weights, reshard)


def forgotten_model(sizes: Sizes) -> None:
    model = Transformer()
    optimizer = build(model, sizes)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    layer = weakref.ref(model.layers[0])
    del model, optimizer
    gc.collect()
    assert layer() is None, "something keeps the model alive"


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_model_that_nobody_holds_is_freed(ranks, sizes):
    ranks(4, forgotten_model, sizes)


class Detached(nn.Module):
    """Its first use of the weight wants no gradient for it, and comes last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DetachedLayer(), DetachedLayer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, True))
            x = x + layer(x, False)
        return x


class DetachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_proj = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor, detach: bool) -> torch.Tensor:
        weight = self.a_proj.weight.detach() if detach else self.a_proj.weight
        return x @ (weight.full_tensor() if isinstance(weight, DTensor) else weight)


def detached_use(sizes: Sizes, reshard: bool) -> None:
    model = Detached()
    oracle, reference = with_oracle(model)
    dedicate_on(model, sizes, reshard=reshard)
    optimizer = dmuon.Muon(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        return m(x).square().mean()

    for step in range(2):
        backward_both(model, oracle, step, loss)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_weights_are_there_for_uses_without_gradient(ranks, sizes, reshard):
    ranks(4, detached_use, sizes, reshard)


def step_between_two_forwards() -> None:
    model = OnlyDedicated()
    dedicate(model, make_mesh((2,)), predicate=lambda name, p: True)
    optimizer = dmuon.Muon(model)
    x = torch.ones(2, 6)
    model(x).sum().backward()
    first = model(x).sum()
    optimizer.step()
    second = model(x).sum()
    with pytest.raises(RuntimeError, match="have changed between its forward and its"):
        (first + second).backward()


def test_an_old_forward_beside_a_new_one_is_an_error(ranks):
    ranks(2, step_between_two_forwards)


def freeze_between_forward_and_backward() -> None:
    model = OnlyDedicated()
    oracle, reference = with_oracle(model, lambda name, p: True)
    dedicate(model, make_mesh((2,)), predicate=lambda name, p: True)
    optimizer = dmuon.Muon(model)

    def loss(m: nn.Module, seed: int) -> torch.Tensor:
        return m(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean()

    out = loss(model, 5)
    for record in dmuon.get_dedicated_params(model):
        record.resting.requires_grad_(False)
    out.backward()
    optimizer.zero_grad()
    for record in dmuon.get_dedicated_params(model):
        record.resting.requires_grad_(True)
    backward_both(model, oracle, 0, loss)
    step_both(optimizer, reference)
    assert_weights_close(model, oracle)


def test_gradients_of_a_frozen_parameter_do_not_come_back(ranks):
    ranks(2, freeze_between_forward_and_backward)


def copy_and_pickle() -> None:
    model = OnlyDedicated()
    dedicate(model, make_mesh((1,)), predicate=lambda name, p: True)
    with pytest.raises(TypeError, match="copy it before dedicate_params"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(model)


def test_copies_and_pickles_are_refused(ranks):
    ranks(1, copy_and_pickle)


def uncallable_boundary() -> None:
    model = OnlyDedicated()
    dedicate(
        model, make_mesh((1,)), predicate=lambda name, p: True, hook_boundary=lambda name, m: name == "layers"
    )
    with pytest.raises(ValueError, match="selects layers, a ModuleList"):
        dmuon.Muon(model)


def test_a_boundary_that_is_never_called_is_refused(ranks):
    ranks(1, uncallable_boundary)


def average_after_the_step() -> None:
    """Code that reads the weights itself."""
    model = Transformer()
    optimizer = build(model, {"replicate": 2, "shard": 2})
    loss_of(model, dist.get_rank()).backward()
    optimizer.step()
    optimizer.synchronize()
    for record in dmuon.get_dedicated_params(model):
        value = dmuon.full_tensor(record.resting).detach()
        if record.keeps_weight:
            assert torch.equal(record.resting.detach().to_local(), value)


def test_synchronize_before_reading_weights(ranks):
    ranks(4, average_after_the_step)
