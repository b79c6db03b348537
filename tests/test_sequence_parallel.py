"""Sequence parallelism: weights that tensor parallelism replicates get their gradients in addends."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dmuon
from models import assert_ranks_equal, assert_weights_close, is_proj, mean_backward, step_both, with_oracle
from reference import ReferenceMuon

pytestmark = pytest.mark.always("dp2-tp2", "ddp2-tp2")

MESHES = [
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
    pytest.param({"dp": 1, "tp": 4}, id="dp1-tp4"),
    pytest.param({"dp": 4, "tp": 1}, id="dp4-tp1"),
    pytest.param({"replicate": 2, "shard": 1, "tp": 2}, id="hsdp2x1-tp2"),
]
SEQUENCE, WIDTH, HIDDEN = 8, 6, 12


class Gate(nn.Module):
    """A router's matrix, which every rank applies to its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate_proj(x))


class LocalGate(Gate):
    """The same, written on local tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.gate_proj.weight, self.gate_proj.bias
        if not isinstance(x, DTensor):
            return torch.sigmoid(nn.functional.linear(x, weight, bias))
        mesh = x.device_mesh
        weight, bias = (p.to_local(grad_placements=[Partial()]) for p in (weight, bias))
        scores = nn.functional.linear(x.to_local(), weight, bias)
        return torch.sigmoid(DTensor.from_local(scores, mesh, [Shard(1)], run_check=False))


class GateForTwo(Gate):
    """The matrix is used on the tokens and on what all ranks have alike: addends and a whole gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate_proj.weight
        penalty = weight.square().sum()
        return torch.sigmoid(self.gate_proj(x)) * (1 + penalty)


class Layer(nn.Module):
    def __init__(self, gate: type[Gate]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = gate()
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.gate(h) * self.down_proj(torch.tanh(self.up_proj(h)))


class Model(nn.Module):
    """Activations lie in pieces of the sequence between the matrices."""

    def __init__(self, gate: type[Gate] = Gate) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(gate) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    tokens = Shard(1)
    for layer in model.layers:
        distribute_module(layer.gate, mesh)  # replicated
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up_proj": ColwiseParallel(input_layouts=tokens, use_local_output=False),
            "down_proj": RowwiseParallel(output_layouts=tokens, use_local_output=False),
        }
        parallelize_module(layer, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "layers.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(tokens,), use_local_output=False
            ),
            "norm": SequenceParallel(use_local_output=False),
        },
    )
    whole = PrepareModuleOutput(output_layouts=(tokens,), desired_output_layouts=(Replicate(),))
    parallelize_module(model, mesh, whole)


def build(model: Model, sizes: dict[str, int], **muon: Any) -> dmuon.Muon:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    parallelize(model, mesh["tp"])
    if "replicate" in sizes:
        data = mesh["replicate", "shard"]
        dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"], predicate=is_proj)
    else:
        data = mesh["dp"]
        dmuon.dedicate_params(model, data, predicate=is_proj)
    for module in (*model.layers, model):
        fully_shard(module, mesh=data)
    return dmuon.Muon(model, **muon)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, SEQUENCE, WIDTH, generator=generator)
    target = torch.randn(3, SEQUENCE, WIDTH, generator=generator)
    return (model(x) - target).square().mean()


def train(sizes: dict[str, int], gate: type[Gate]) -> None:
    torch.manual_seed(1)
    model = Model(gate)
    oracle = copy.deepcopy(model)
    settings = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 3e-3}
    reference = ReferenceMuon(oracle, is_proj, **settings)
    optimizer = build(model, sizes, **settings)
    records = {record.param_name: record for record in dmuon.get_dedicated_params(model)}
    assert sorted(records) == sorted(n for n, p in oracle.named_parameters() if is_proj(n, p))
    mine, replicas = dist.get_rank() // sizes["tp"], dist.get_world_size() // sizes["tp"]
    arrived: list[DTensor] = []
    for step in range(3):
        for micro in range(1 + step % 2):  # the second step accumulates
            seed = 100 * step + 10 * micro
            loss = loss_of(model, seed + mine)
            if step == 0:
                records["layers.1.gate.gate_proj.weight"].gathered.register_hook(arrived.append)
            loss.backward()
            mean_backward(oracle, loss_of, [seed + rank for rank in range(replicas)])
        assert any(placement.is_partial() for placement in arrived[0].placements)
        for name, param in model.named_parameters():
            expected = oracle.get_parameter(name).grad
            if name not in records:  # norms and biases
                whole = param.grad.full_tensor()
                assert_close(whole, expected, f"gradient of {name}")
                assert_ranks_equal({name: whole})
            elif records[name].is_owner:
                assert_close(records[name].local_gradient(), expected, f"gradient of {name}")
            else:
                assert records[name].local_gradient().numel() == 0
        optimizer.step()
        reference.step()
        for name, record in records.items():
            if record.is_owner:
                momentum = optimizer.state[record.resting]["momentum_buffer"].to_local()
                expected = reference.buffers[oracle.get_parameter(name)]
                assert_close(momentum, expected, f"momentum of {name}")
        optimizer.zero_grad()
        reference.zero_grad()
        assert_weights_close(model, oracle)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Relative to the largest element: gradients are small, and a wrong factor must not fit in between."""
    assert found.shape == expected.shape, what
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    assert difference <= 1e-5, f"{what} is off by {difference} of its largest element"


@pytest.mark.parametrize("gate", [Gate, LocalGate, GateForTwo])
@pytest.mark.parametrize("sizes", MESHES)
def test_training_equals_the_oracle(ranks, sizes, gate):
    ranks(4, train, sizes, gate)


# Two tensor-parallel dims: one cuts the matrix, over the other its gradient comes in addends


class Rows(nn.Module):
    """Each rank applies its rows to its share of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.w_proj = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.w_proj, DTensor):
            return (x @ self.w_proj.T).square().mean()
        mesh = self.w_proj.device_mesh
        mine = x.chunk(mesh.size(1))[mesh.get_coordinate()[1]]
        out = mine @ self.w_proj.to_local(grad_placements=[Shard(0), Partial()]).T
        shape = torch.Size((len(x), 5))
        whole = DTensor.from_local(
            out, mesh, [Shard(1), Shard(0)], run_check=False, shape=shape, stride=(5, 1)
        )
        return whole.full_tensor().square().mean()


def cut_and_in_addends(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Rows())
    oracle, reference = with_oracle(model)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    weight = distribute_tensor(model[0].w_proj.detach(), mesh["tp1", "tp2"], [Shard(0), Replicate()])
    model[0].w_proj = nn.Parameter(weight)
    dmuon.dedicate_params(model, mesh["dp"], predicate=is_proj)
    optimizer = dmuon.Muon(model)
    mine, replicas = mesh.get_coordinate()[0], sizes["dp"]

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return model(torch.randn(SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(seed)))

    for step in range(2):
        loss(model, 10 * step + mine).backward()
        mean_backward(oracle, loss, [10 * step + rank for rank in range(replicas)])
        (record,) = dmuon.get_dedicated_params(model)
        if record.is_owner:
            assert_close(record.local_gradient(), oracle[0].w_proj.grad, "gradient")
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 1, "tp1": 2, "tp2": 2}, {"dp": 2, "tp1": 1, "tp2": 2}, {"dp": 2, "tp1": 2, "tp2": 1}],
    ids=str,
)
def test_a_cut_matrix_with_a_gradient_in_addends(ranks, sizes):
    ranks(4, cut_and_in_addends, sizes)


# Tokens that go to different matrices


class Expert(nn.Module):
    """Used by those tensor-parallel ranks that have tokens for it, and not at all by the others."""

    def __init__(self) -> None:
        super().__init__()
        self.w_proj = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor, users: list[int]) -> torch.Tensor:
        if not isinstance(self.w_proj, DTensor):
            return torch.stack([(part @ self.w_proj.T).square().sum() for part in x[users]]).sum()
        mesh = self.w_proj.device_mesh
        mine = mesh.get_local_rank()
        loss = 0 * x.sum()  # for the graph's sake: no matrix in it
        if mine in users:
            loss = (x[mine] @ self.w_proj.to_local(grad_placements=[Partial()]).T).square().sum()
        return DTensor.from_local(loss, mesh, [Partial()], run_check=False).full_tensor()


class Experts(nn.Module):
    def __init__(self, users: list[list[int]]) -> None:
        super().__init__()
        self.users = users
        self.experts = nn.ModuleList(Expert() for _ in users)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.experts, self.users, strict=True)
        return torch.stack([expert(x, users) for expert, users in pairs]).sum()


def tokens_for_some(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Experts([[0], [1], [0, 1]])
    oracle, reference = with_oracle(model)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for expert in model.experts:
        distribute_module(expert, mesh["tp"])
    dmuon.dedicate_params(model, mesh["dp"], predicate=is_proj)
    for expert in model.experts:
        fully_shard(expert, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model)

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        x = torch.randn(2, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(seed))
        return model(x.requires_grad_())

    for step in range(3):
        loss(model, 10 * step + mesh.get_coordinate()[0]).backward()
        mean_backward(oracle, loss, [10 * step + rank for rank in range(sizes["dp"])])
        for record in dmuon.get_dedicated_params(model):
            if record.is_owner:
                expected = oracle.get_parameter(record.param_name).grad
                assert_close(record.local_gradient(), expected, f"gradient of {record.param_name}")
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)


def test_matrices_that_some_of_the_ranks_have_tokens_for(ranks):
    ranks(4, tokens_for_some, {"dp": 2, "tp": 2})
