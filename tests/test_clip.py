"""Clipping: the global norm over gradients on any mix of meshes, against torch's in one process."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon
from models import assert_ranks_equal, assert_weights_close, is_proj, mean_backward, step_both, with_oracle
from reference import ReferenceMuon

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]
CLIPS = [(0.5, 2.0), (1e4, 2.0), (1.0, 1.0), (1e4, 1.0), (0.1, math.inf), (0.2, 3.0)]  # by micro-batch
MESHES = [  # and how many all-reduces a call issues there: one per mesh, slices of one dim beside the whole
    pytest.param({"dp": 4}, 1, id="fsdp"),
    pytest.param({"replicate": 2, "shard": 2}, 1, id="hsdp"),
    pytest.param({"dp": 2, "tp": 2}, 2, id="fsdp-tp"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, 2, id="hsdp-tp"),
    pytest.param({"ddp": 4}, 1, id="ddp"),
    pytest.param({"ddp": 2, "tp": 2}, 2, id="ddp-tp"),
]


class Layer(nn.Module):
    """Matrices that TP cuts by rows and by columns, replicates and leaves plain; uneven everywhere."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(width, hidden)  # cut as well, and not dedicated
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_proj(self.norm(x))
        return x + self.down_proj(torch.tanh(self.up_proj(x))) + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 13) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "up_proj": ColwiseParallel(use_local_output=False),
    "down_proj": RowwiseParallel(),
    "up": ColwiseParallel(use_local_output=False),
    "down": RowwiseParallel(),
}


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return 10 * model(x).square().mean()


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def build(model: nn.Module, sizes: dict[str, int], **muon: Any) -> dmuon.Muon:
    mesh = make_mesh(sizes)
    if "tp" in sizes:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], PLAN)
    if "ddp" in sizes:
        tp = "_tp" if "tp" in sizes else ""
        getattr(dmuon, f"dedicate_params_ddp{tp}")(model, mesh["ddp"], predicate=is_proj)
        getattr(dmuon, f"replicate{tp}")(model, mesh["ddp"])
        return dmuon.Muon(model, **muon)
    if "dp" in sizes:
        data = mesh["dp"]
        dmuon.dedicate_params(model, data, predicate=is_proj)
    else:
        data = mesh["replicate", "shard"]
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"], predicate=is_proj)
    for module in (*model.layers, model):
        fully_shard(module, mesh=data)
    return dmuon.Muon(model, **muon)


class NoHostSync(TorchDispatchMode):
    """Raises where a value is read back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """The sizes of the groups that tensors are all-reduced over."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.numel() <= 2
        sizes.append(dist.get_world_size(kwargs["group"]))
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counted):
        yield sizes


def assert_gradients_close(model: nn.Module, oracle: nn.Module) -> None:
    """Each gradient, whole, to that of the oracle; Newton-Schulz would hide a wrong scale."""
    records = {record.param_name: record for record in dmuon.get_dedicated_params(model)}
    assert records
    for name, param in model.named_parameters():
        expected = oracle.get_parameter(name).grad
        if name not in records:
            found = dmuon.full_tensor(param.grad)
        elif records[name].is_owner:
            found = records[name].local_gradient()
        else:
            assert records[name].local_gradient().numel() == 0
            continue
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def train(sizes: dict[str, int], expected_all_reduces: int) -> None:
    """Clipped after each micro-batch: what a later one clips is the clipped sum of the earlier ones."""
    torch.manual_seed(1)
    model = Model()
    oracle = copy.deepcopy(model)
    reference = ReferenceMuon(oracle, is_proj, lr=0.05)
    optimizer = build(model, sizes, lr=0.05)
    tp = sizes.get("tp", 1)
    mine, replicas = dist.get_rank() // tp, dist.get_world_size() // tp
    for step in range(2):
        for micro, (max_norm, norm_type) in enumerate(CLIPS):
            seed = 100 * step + 10 * micro
            loss_of(model, seed + mine).backward()
            mean_backward(oracle, loss_of, [seed + rank for rank in range(replicas)])
            with all_reduces() as seen, NoHostSync():
                norm = dmuon.clip_grad_norm_(model, max_norm, norm_type)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, norm_type)
            assert len(seen) == expected_all_reduces
            assert type(norm) is torch.Tensor
            assert norm.shape == ()
            assert (expected > max_norm) == (max_norm < 1e4)
            torch.testing.assert_close(norm, expected, atol=0, rtol=1e-5)
            assert_ranks_equal({"norm": norm})
            assert_gradients_close(model, oracle)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.always("hsdp-tp", "ddp-tp")
@pytest.mark.parametrize(("sizes", "expected_all_reduces"), MESHES)
def test_training_equals_the_oracle_with_torchs_clipping(ranks, sizes, expected_all_reduces):
    ranks(4, train, sizes, expected_all_reduces)


# Weights of every kind in one call


class Product(nn.Module):
    """A weight whose gradient is all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self) -> torch.Tensor:
        whole = self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight
        return whole.sum()


def cut(module: Product, mesh: DeviceMesh) -> Product:
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
    return module


def fsdp(*modules: Product, mesh: DeviceMesh, dedicated: bool = False) -> nn.Module:
    model = nn.ModuleList(modules)
    if dedicated:
        dmuon.dedicate_params(model, mesh, predicate=lambda name, param: True)
    for module in modules:
        fully_shard(module, mesh=mesh)
    if dedicated:
        dmuon.Muon(model)
    return model


def replicated(module: Product, mesh: DeviceMesh) -> nn.Module:
    model = nn.ModuleList([module])
    dmuon.dedicate_params_ddp_tp(model, mesh, predicate=lambda name, param: True, hook_boundary=Product)
    dmuon.Muon(model)
    return model


def mixed_kinds(kinds: list[str]) -> tuple[float, list[torch.Tensor], list[int]]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    make = {
        "plain": lambda: nn.ModuleList([Product()]),
        "fsdp": lambda: fsdp(Product(), mesh=line),
        "tp": lambda: nn.ModuleList([cut(Product(), grid["tp"])]),
        "fsdp of a slice": lambda: fsdp(Product(), mesh=grid["dp"]),
        "fsdp+tp": lambda: fsdp(cut(Product(), grid["tp"]), mesh=grid["dp"]),
        "owner": lambda: fsdp(Product(), mesh=line, dedicated=True),
        "owner+tp": lambda: fsdp(cut(Product(), grid["tp"]), mesh=grid["dp"], dedicated=True),
        "ddp owner": lambda: replicated(Product(), mesh=line),
        "ddp owner+tp": lambda: replicated(cut(Product(), grid["tp"]), mesh=grid["dp"]),
    }
    models = nn.ModuleList(make[kind]() for kind in kinds)
    for model in models:
        for module in model:
            module().backward()
    with all_reduces() as seen:
        norm = dmuon.clip_grad_norm_(models.parameters(), 1.0)
    assert_ranks_equal({"norm": norm})
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in models.parameters()]
    return norm.item(), gradients, sorted(seen)


@pytest.mark.parametrize(
    ("kinds", "norm", "entry", "expected_all_reduces"),
    [
        (["plain", "fsdp", "fsdp+tp"], 6.928203, 0.144338, [4]),
        (["plain", "fsdp", "fsdp+tp", "owner"], 8.0, 0.125, [4]),
        (["plain", "fsdp", "fsdp+tp", "owner+tp"], 8.0, 0.125, [4]),
        (["tp", "fsdp of a slice", "plain", "owner+tp"], 8.0, 0.125, [2, 2, 4]),
        (["plain", "fsdp", "fsdp+tp", "ddp owner"], 8.0, 0.125, [4]),
        (["plain", "fsdp", "ddp owner", "ddp owner+tp"], 8.0, 0.125, [4]),
        (["plain"], 4.0, 0.25, []),
    ],
    ids=str,
)
def test_weights_of_every_kind_in_one_call(ranks, kinds, norm, entry, expected_all_reduces):
    entries = [0] * len(kinds)
    for found, gradients, seen in ranks(4, mixed_kinds, kinds):
        assert found == pytest.approx(norm, abs=1e-6)
        assert seen == expected_all_reduces
        for index, gradient in enumerate(gradients):
            entries[index] += gradient.numel()
            torch.testing.assert_close(gradient, torch.full_like(gradient, entry), atol=1e-6, rtol=0)
    copies = {"plain": 4, "tp": 2, "fsdp of a slice": 2}
    assert entries == [16 * copies.get(kind, 1) for kind in kinds]


# Any placements


SHAPES = [(5, 3), (1, 8), (7,), (0, 3)]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PLACEMENTS = [  # of parameter and gradient
    ((R, R), (R, R)),
    ((R, S0), (R, S0)),
    ((S0, R), (S0, R)),
    ((S0, S0), (S0, S0)),
    ((R, R), (R, P)),
    ((S0, R), (P, R)),
    ((R, R), (P, P)),
    ((S0, R), (S0, P)),
]
ON_A_SLICE = [((R,), (R,)), ((S0,), (S0,)), ((R,), (P,)), ((S0,), (P,))]


def with_gradient(
    whole: torch.Tensor, mesh: DeviceMesh | None, of_param: tuple, of_grad: tuple
) -> nn.Parameter:
    """A parameter of zeros with this gradient; on a partial dim, ranks hold unequal addends of it."""
    if mesh is None:
        param = nn.Parameter(torch.zeros_like(whole))
        param.grad = whole.clone()
        return param
    param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, of_param, src_data_rank=None))
    resolved = [R if p.is_partial() else p for p in of_grad]
    local = distribute_tensor(whole, mesh, resolved, src_data_rank=None).to_local().clone()
    for dim, placement in enumerate(of_grad):
        if placement.is_partial():
            local *= 2 if mesh.get_coordinate()[dim] == 0 else -1
    grad = DTensor.from_local(local, mesh, of_grad, run_check=False, shape=whole.shape, stride=whole.stride())
    param.grad = grad
    return param


def any_placements(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(3)
    cases = []
    for shape in SHAPES:
        placements = [(mesh, *placements) for placements in PLACEMENTS]
        placements += [(mesh[name], *placements) for name in "ab" for placements in ON_A_SLICE]
        if len(shape) == 2:
            placements += [(mesh, (S0, S1), (S0, S1)), (mesh, (R, S1), (P, S1)), (mesh["b"], (S1,), (S1,))]
        placements.append((None, (), ()))
        cases += [(torch.randn(shape, generator=generator).to(dtype), *one) for one in placements]
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    flat = torch.cat([case[0].flatten() for case in cases]).to(precise)
    for norm_type, max_norm in [(0.5, 1.0), (1.0, 1.0), (2.0, 1e6), (2.0, 1.0), (3.0, 1.0), (math.inf, 1.0)]:
        params = [with_gradient(*case) for case in cases]
        with all_reduces() as seen:
            norm = dmuon.clip_grad_norm_(params, max_norm, norm_type)
        expected = torch.linalg.vector_norm(flat, norm_type)
        assert seen == [4, 2, 2]  # the mesh, and either slice
        assert norm.dtype == precise
        torch.testing.assert_close(norm, expected, atol=0, rtol=tolerance)
        assert_ranks_equal({"norm": norm})
        coefficient = (max_norm / (expected + 1e-6)).clamp(max=1)
        for (whole, where, of_param, _), param in zip(cases, params, strict=True):
            clipped = (whole.to(precise) * coefficient).to(dtype)
            found = param.grad
            if where is not None:
                assert found.placements == of_param
                clipped = distribute_tensor(clipped, where, of_param, src_data_rank=None).to_local()
                found = found.to_local()
            close = 1e-2 if dtype == torch.bfloat16 and max_norm == 1.0 else tolerance
            torch.testing.assert_close(found, clipped, atol=0, rtol=close)


@pytest.mark.always("torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_placements(ranks, dtype):
    ranks(4, any_placements, dtype)


def slices_of_a_larger_world(norm_type: float) -> list[int]:
    """On a mesh that does not have all ranks, the sum runs over its dims in turn."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(1.0, 16.0).view(5, 3)
    cases = [(S0, S0), (R, S0), (S1, R), (R, R)]
    params = [with_gradient(whole, mesh, case, case) for case in cases]
    with all_reduces() as seen, mock.patch.object(dist, "get_world_size", return_value=8):
        norm = dmuon.clip_grad_norm_(params, 1.0, norm_type)
    expected = torch.linalg.vector_norm(torch.stack([whole] * len(cases)), norm_type)
    torch.testing.assert_close(norm, expected)
    assert_ranks_equal({"norm": norm})
    return seen


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_mesh_without_all_ranks(ranks, norm_type):
    for seen in ranks(4, slices_of_a_larger_world, norm_type):
        assert len(seen) == 2


# Not finite


def one_rank_is_not_finite(norm_type: float, bad: float) -> None:
    """The element lies in the piece of one rank. All decide alike, and as torch does."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(10.0).view(5, 2)
    whole[3, 1] = bad  # of rank 1
    param = with_gradient(whole, mesh, (S0,), (S0,))
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="norm of order"):
        dmuon.clip_grad_norm_([param, other], 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(other.grad, torch.ones(2))
    oracles = [nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(2))]
    oracles[0].grad, oracles[1].grad = whole, torch.ones(2)
    expected = nn.utils.clip_grad_norm_(oracles, 1.0, norm_type)
    norm = dmuon.clip_grad_norm_([param, other], 1.0, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    assert not norm.isfinite()
    for found, oracle in zip((param.grad.full_tensor(), other.grad), oracles, strict=True):
        torch.testing.assert_close(found, oracle.grad, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_one_rank_is_not_finite(ranks, norm_type, bad):
    ranks(4, one_rank_is_not_finite, norm_type, bad)


def one_ranks_data_is_infinite(sizes: dict[str, int]) -> None:
    """Every rank raises, and the iteration after a skipped step is right."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    tp = sizes.get("tp", 1)
    mine, replicas = dist.get_rank() // tp, dist.get_world_size() // tp
    loss = loss_of(model, 0)
    (loss * math.inf if mine == 1 else loss).backward()
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="norm of order"):
            dmuon.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    optimizer.zero_grad()
    loss_of(model, mine).backward()
    mean_backward(oracle, loss_of, list(range(replicas)))
    dmuon.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)
    nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
    assert_gradients_close(model, oracle)
    optimizer.step()
    reference.step()
    assert_weights_close(model, oracle)


@pytest.mark.always("{'dp': 2, 'tp': 2}", "{'ddp': 4}")
@pytest.mark.parametrize("sizes", [case.values[0] for case in MESHES], ids=str)
def test_one_ranks_data_is_infinite(ranks, sizes):
    ranks(4, one_ranks_data_is_infinite, sizes)


# The call, in one process


def small_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model(torch.ones(5, 3)).square().sum().backward()
    return model


@pytest.mark.parametrize(
    "argument",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: [*model.parameters(), *model.parameters()],  # each counts once
        lambda model: [*model.parameters(), nn.Parameter(torch.ones(2))],  # one without a gradient
    ],
)
def test_what_may_be_passed(argument):
    model, oracle = small_model(), small_model()
    norm = dmuon.clip_grad_norm_(argument(model), 0.1)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(oracle.parameters(), 0.1))
    for param, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)


def test_one_tensor():
    weight = torch.ones(2, 2, requires_grad=True)
    weight.grad = torch.full((2, 2), 3.0)
    assert dmuon.clip_grad_norm_(weight, 3.0) == 6.0
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 1.5))


def test_no_gradient_at_all():
    for argument in (nn.Linear(2, 2), [], iter(())):
        assert torch.equal(dmuon.clip_grad_norm_(argument, 1.0, error_if_nonfinite=True), torch.tensor(0.0))


@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -math.inf), (1.0, math.nan)]
)
def test_values_out_of_range(max_norm, norm_type):
    model, untouched = small_model(), small_model()
    with pytest.raises(ValueError, match="must be"):
        dmuon.clip_grad_norm_(model, max_norm, norm_type)
    for param, expected in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)


def test_what_holds_no_tensors():
    with pytest.raises(TypeError, match="it has a str"):
        dmuon.clip_grad_norm_(["weight"], 1.0)
