"""`torch.compile` of layers, and recomputation, in either nesting."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.engine.runtime import find_runtime
from layouts import Model, dedicate, is_proj, make_mesh, parallelize, shard
from models import full_weights, mean_backward, step_both, with_oracle

Backend = torch._dynamo.testing.CompileCounterWithBackend


def compiled(layer: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(layer, backend=backend)


def in_place(layer: nn.Module, backend: Backend) -> nn.Module:
    layer.compile(backend=backend)
    return layer


def recomputed_inside(layer: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(checkpoint_wrapper(layer), backend=backend)


def recomputed_outside(layer: nn.Module, backend: Backend) -> nn.Module:
    return checkpoint_wrapper(torch.compile(layer, backend=backend))


def reentrant(layer: nn.Module, backend: Backend) -> nn.Module:
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)


def not_reentrant(layer: nn.Module, backend: Backend) -> nn.Module:
    return checkpoint_wrapper(layer)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return (
        model(x.requires_grad_()).square().mean()
    )  # without, reentrant recomputation would give no gradients


Wrap = Callable[[nn.Module, Backend], nn.Module]


def train(sizes: dict[str, int], wrap: Wrap, when: str) -> int:
    """Trains like the oracle; returns how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    mesh = make_mesh(sizes)
    backend = Backend("aot_eager")
    if "tp" in sizes:
        parallelize(model, mesh)

    def wrap_layers() -> None:
        for index, layer in enumerate(model.layers):
            model.layers[index] = wrap(layer, backend)

    if when == "first":
        wrap_layers()
    seen = []
    dedicate(model, mesh, predicate=lambda n, p: seen.append(n) or is_proj(n, p))
    assert seen == [name for name, _ in oracle.named_parameters()]  # without the wrappers' prefixes
    if when == "dedicated":
        wrap_layers()
    shard(model, mesh)
    if when == "last":
        wrap_layers()
    optimizer = dmuon.Muon(model)
    assert len(find_runtime(model).groups) == 2  # one per layer, wherever the wrapper stands
    for step in range(3):
        loss_of(model, 10 * step + mesh.get_coordinate()[0]).backward()
        mean_backward(oracle, loss_of, [10 * step + rank for rank in range(mesh.shape[0])])
        step_both(optimizer, reference)
        for found, expected in zip(full_weights(model).values(), oracle.parameters(), strict=True):
            assert (found - expected).abs().max() < 1e-5
    assert not torch._dynamo.utils.counters["graph_break"]
    # With a checkpoint wrapper around a compiled layer, torch leaves the compiler's prefix in the names.
    left = "_orig_mod." if wrap is recomputed_outside else ""
    for names in (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)["state"]):
        assert {name.replace(left, "") for name in names} == set(oracle.state_dict())
    assert [p.param_name for p in dmuon.get_dedicated_params(model)] == [
        name for name, p in oracle.named_parameters() if is_proj(name, p)
    ]
    return backend.frame_count


@pytest.mark.always("compiled-first", "in_place-last")
@pytest.mark.parametrize(
    ("wrap", "when"),
    [
        (compiled, "first"),
        (compiled, "last"),
        (in_place, "first"),
        (in_place, "dedicated"),
        (in_place, "last"),
    ],
)
def test_each_layer_is_one_graph(ranks, wrap, when):
    """No more than one graph per layer (torch may share one): no break of ours in it, no recompilation."""
    assert all(1 <= graphs <= 2 for graphs in ranks(2, train, {"dp": 2}, wrap, when))


@pytest.mark.always("recomputed_inside", "not_reentrant")
@pytest.mark.parametrize(
    "wrap", [recomputed_inside, recomputed_outside, reentrant, not_reentrant], ids=lambda fn: fn.__name__
)
def test_recomputation(ranks, wrap):
    graphs = ranks(2, train, {"dp": 2}, wrap, "first")
    assert all(1 <= count <= 2 if "recomputed" in wrap.__name__ else count == 0 for count in graphs)


def whole_model(sizes: dict[str, int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    mesh = make_mesh(sizes)
    dedicate(model, mesh)
    shard(model, mesh)
    model.compile(backend="aot_eager")
    optimizer = dmuon.Muon(model)
    for step in range(3):
        loss_of(model, 10 * step + dist.get_rank()).backward()
        mean_backward(oracle, loss_of, [10 * step + rank for rank in range(2)])
        step_both(optimizer, reference)
        for found, expected in zip(full_weights(model).values(), oracle.parameters(), strict=True):
            assert (found - expected).abs().max() < 1e-5


def test_the_whole_model(ranks):
    ranks(2, whole_model, {"dp": 2})


def default_choice() -> list[list[str]]:
    """Compiled blocks are blocks: the default predicate and the default boundaries see through."""
    plain = Model(depth=2)
    wrapped = Model(depth=2)
    for index, layer in enumerate(wrapped.layers):
        wrapped.layers[index] = torch.compile(layer, backend="eager")
    names = []
    for model in (plain, wrapped):
        mesh = make_mesh({"dp": 1})
        params = dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh)
        names.append([param.param_name for param in params])
        dmuon.Muon(model, param_groups=[{"params": [names[-1][0]], "lr": 0.1}])
        assert not any("_orig_mod" in line for line in dmuon.summary(model).splitlines())
    return names


def test_default_choice_of_compiled_blocks(ranks):
    plain, wrapped = ranks(1, default_choice)[0]
    assert plain == wrapped


def under_tensor_parallelism() -> None:
    assert train({"dp": 1, "tp": 2}, compiled, "first") >= 1


def test_with_tensor_parallelism(ranks):
    ranks(2, under_tensor_parallelism)
