"""Master weights, and what travels in which dtype."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon
from layouts import LAYOUTS, data_rank, distribute, make_mesh
from models import InnerProducts, assert_ranks_equal, everything, full_weights
from reference import ReferenceMuon

pytestmark = pytest.mark.always("dp4", "ddp2-tp2")

SHAPES = [(5, 3), (2, 6), (4, 4)]


def build(
    sizes: dict[str, int],
    dtype: torch.dtype,
    master: torch.dtype | None,
    policy: MixedPrecisionPolicy | None = None,
    **muon: Any,
) -> Any:
    """Matrices of `dtype`, whose gradients are given and exact in bfloat16."""
    torch.manual_seed(1)
    model = InnerProducts([torch.randn(shape).to(dtype) for shape in SHAPES])
    distribute(model, sizes, predicate=everything, master_dtype=master, mp_policy=policy)
    return model, dmuon.Muon(model, **muon)


def target(shape: tuple[int, ...], step: int, rank: int, most: int = 7) -> torch.Tensor:
    """Exact in bfloat16. Sums of four, and their mean, are so as well, with the default `most`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def train(sizes: dict[str, int], steps: int, *, masters: bool) -> None:
    """bfloat16 in the model, either because it is (with masters in float32) or by a policy."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    most = 7 if masters else 255  # the policy's sums are in float32
    if masters:
        model, optimizer = build(sizes, torch.bfloat16, torch.float32, lr=1e-3)
    else:
        model, optimizer = build(sizes, torch.float32, None, policy, lr=1e-3)
    torch.manual_seed(1)
    weights = [torch.randn(shape) for shape in SHAPES]
    oracle = InnerProducts([weight.bfloat16().float() if masters else weight for weight in weights])
    reference = ReferenceMuon(oracle, everything, lr=1e-3)
    mine, replicas = data_rank(sizes)
    start = {name: weight.detach().clone() for name, weight in oracle.named_parameters()}
    for step in range(steps):
        model([target(shape, step, mine, most).bfloat16() for shape in SHAPES]).backward()
        for layer, shape in zip(oracle.layers, SHAPES, strict=True):
            layer.weight.grad = torch.stack([target(shape, step, r, most) for r in range(replicas)]).mean(0)
        for record in dmuon.get_dedicated_params(model):
            if record.keeps_state:
                assert torch.equal(
                    record.resting.grad._local_tensor, oracle.get_parameter(record.param_name).grad
                )
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    weights = full_weights(model)
    assert_ranks_equal(weights)
    for name, expected in oracle.named_parameters():
        assert weights[name].dtype == torch.float32
        assert (weights[name] - expected).abs().max() < 1e-5
        assert (expected - start[name]).abs().max() > 1e-3  # it has moved
    for param in dmuon.get_dedicated_params(model):
        assert param.resting.dtype == torch.float32
        assert param.gathered.dtype == torch.bfloat16
        assert optimizer.state[param.resting]["momentum_buffer"].dtype == torch.float32


@pytest.mark.always("dp4")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_hundred_small_steps_of_a_bfloat16_model(ranks, sizes):
    ranks(4, train, sizes, 100, masters=True)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_policy_is_followed_on_every_layout(ranks, sizes):
    ranks(4, train, sizes, 5, masters=False)


def checkpoint(sizes: dict[str, int]) -> None:
    """The master weights come back bit for bit, into a model that was bfloat16 from the start."""
    model, optimizer = build(sizes, torch.bfloat16, torch.float32)
    for step in range(3):
        model([target(shape, step, 0).bfloat16() for shape in SHAPES]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = full_weights(model)
    other, other_optimizer = build(sizes, torch.bfloat16, torch.float32)
    set_model_state_dict(other, get_model_state_dict(model))
    other_optimizer.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (other, other_optimizer)):
        for name, weight in full_weights(m).items():
            assert torch.equal(weight, expected[name])
            assert not torch.equal(weight, weight.bfloat16().float())
        m([target(shape, 3, 0).bfloat16() for shape in SHAPES]).backward()
        o.step()
    found = full_weights(other)
    for name, weight in full_weights(model).items():
        assert torch.equal(weight, found[name])


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_master_weights_survive_a_checkpoint(ranks, sizes):
    ranks(4, checkpoint, sizes)


class Mixed(nn.Module):
    """Two dtypes in one layer, and gradients that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.ones(4, 4))
        self.c = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (self.a.dtype, self.b.dtype, self.c.dtype) == (torch.bfloat16, torch.float32, torch.float64)
        return (self.a.double() * x + self.b.double() * x + self.c * x).sum()


def mixed(master: torch.dtype | None) -> list[torch.dtype]:
    model = Mixed()
    mesh = make_mesh({"dp": 2})
    dmuon.dedicate_params(model, mesh["dp"], predicate=everything, master_dtype=master)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    for _ in range(2):
        model(torch.eye(4, dtype=torch.float64)).backward()
        optimizer.step()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    return [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("master", [None, torch.float32, torch.float64])
def test_each_computes_in_its_own_dtype(ranks, master):
    own = [torch.bfloat16, torch.float32, torch.float64]
    assert ranks(2, mixed, master)[0] == (own if master is None else [master] * 3)


def warnings(dtype: torch.dtype, master: torch.dtype | None) -> list[str]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    logging.getLogger("dmuon").addHandler(handler)
    try:
        build({"dp": dist.get_world_size()}, dtype, master)
    finally:
        logging.getLogger("dmuon").removeHandler(handler)
    return records


def test_coarse_masters_are_warned_of(ranks):
    (message,) = ranks(1, warnings, torch.bfloat16, None)[0]
    assert "layers.0.weight" in message
    assert "master_dtype" in message
    assert ranks(1, warnings, torch.bfloat16, torch.float32) == [[]]
    assert ranks(1, warnings, torch.float32, None) == [[]]


def policy_beside_masters() -> None:
    """A policy decides in which dtype weights travel, whatever the model's."""
    model = InnerProducts([torch.randn(4, 4)])
    mesh = make_mesh({"dp": 2})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dmuon.dedicate_params(
        model, mesh["dp"], predicate=everything, mp_policy=policy, master_dtype=torch.float64
    )
    fully_shard(model, mesh=mesh)
    model([torch.ones(4, 4).bfloat16()]).backward()
    (param,) = dmuon.get_dedicated_params(model)
    assert param.gathered.dtype == torch.bfloat16
    assert param.resting.dtype == param.resting.grad.dtype == torch.float64


def test_a_policy_beside_master_weights(ranks):
    ranks(2, policy_beside_masters)


@pytest.mark.parametrize("value", ["float32", torch.int32])
def test_what_is_no_dtype_is_refused(ranks, value):
    ranks(1, refuse, value)


def refuse(value: Any) -> None:
    with pytest.raises(ValueError, match="master_dtype"):
        dmuon.dedicate_params(InnerProducts([torch.ones(2, 2)]), make_mesh({"dp": 1}), master_dtype=value)
