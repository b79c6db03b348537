"""The numbers of a step equal those of one process, wherever the matrices lie."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from reference import ReferenceMuon, orthogonalize
from test_stacks import LAYOUTS, SETTINGS, Mixture, distribute, is_muons, loss_of, separate


def expected(oracle: Mixture, reference: ReferenceMuon) -> dict[str, float]:
    """Of the fused and stacked parameters, from the separate ones."""
    fused: dict[str, list] = {}
    for name, p in oracle.named_parameters():
        if p in reference.buffers:
            parts = name.split(".")
            if "experts" in parts:
                parts[3:] = ["gate_up" if parts[3] in ("gate", "up") else "down"]
            elif parts[-1] in "qkv":
                parts[-1] = "qkv.weight"
            fused.setdefault(".".join(parts), []).append(p)
    found = {}
    for name, params in fused.items():
        grads, momenta = [p.grad for p in params], [reference.buffers[p] for p in params]
        orthogonal = [orthogonalize(torch.lerp(g, m, 0.95)) for g, m in zip(grads, momenta, strict=True)]
        updates = [o * max(1, o.shape[0] / o.shape[1]) ** 0.5 for o in orthogonal]
        residual = 0.0
        for o in orthogonal:
            o = o.T if o.shape[0] > o.shape[1] else o
            residual += (o @ o.T - torch.eye(len(o))).square().sum().item() if o.any() else 0.0
        numel = sum(p.numel() for p in params)
        found[f"gradient_norm/{name}"] = norm(grads)
        found[f"momentum_norm/{name}"] = norm(momenta)
        found[f"update_rms/{name}"] = norm(updates) / numel**0.5
        found[f"weight_rms/{name}"] = norm(params) / numel**0.5
        found[f"orthogonality_residual/{name}"] = (residual / sum(min(p.shape) for p in params)) ** 0.5
        found[f"idle_share/{name}"] = sum(not g.any() for g in grads) / len(params)
    return found


def norm(tensors: list[torch.Tensor]) -> float:
    return sum(t.detach().double().square().sum().item() for t in tensors) ** 0.5


def compare(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Mixture()
    oracle = separate(model)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS)
    optimizer = distribute(model, sizes)
    world, rank = dist.get_world_size() // sizes.get("tp", 1), dist.get_rank() // sizes.get("tp", 1)
    with pytest.raises(RuntimeError, match=r"between step\(\) and zero_grad\(\)"):
        optimizer.metrics()
    for step in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(model, 100 * step + rank).backward()
        for r in range(world):
            (loss_of(oracle, 100 * step + r) / world).backward()
        optimizer.step()
        reference.step()
    wanted = expected(oracle, reference)
    found = optimizer.metrics()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert found["idle_share/blocks.0.experts.down"] == pytest.approx(0.2)
    grouped = optimizer.metrics({"experts": "*.experts.*", "first": "blocks.0.*"})
    experts = [found[f"gradient_norm/blocks.{i}.experts.{n}"] for i in (0, 1) for n in ("gate_up", "down")]
    assert grouped["gradient_norm/experts"] == pytest.approx(sum(e**2 for e in experts) ** 0.5, rel=1e-6)
    assert len(grouped) == 12
    with pytest.raises(ValueError, match="has a name like 'no such'"):
        optimizer.metrics({"nothing": "no such"})


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_numbers_of_a_step_equal_those_of_one_process(ranks, sizes):
    ranks(torch.Size(sizes.values()).numel(), compare, sizes)


def of_teams() -> None:
    from layouts import Model, build
    from layouts import loss_of as loss_of_model

    found = []
    for team in ({}, {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}):
        torch.manual_seed(1)
        model = Model()
        optimizer = build(model, {"dp": 1, "tp": 2}, adjust_lr_fn="match_rms_adamw", **team)
        loss_of_model(model, 0).backward()
        model.get_parameter("layers.1.up_proj.weight").grad.zero_()
        optimizer.step()
        found.append(optimizer.metrics())
    assert any(param.has_team for param in dmuon.get_dedicated_params(model))
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-7)


def test_those_of_teams_are_those_of_owners(ranks):
    ranks(2, of_teams)


class Skipping(nn.Module):
    """Two matrices, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a_proj, self.b_proj = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return x + self.a_proj(x) + (self.b_proj(x) if uses else 0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Skipping()])

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.layers[0](x, uses)


def where_nobody_had_a_gradient() -> None:
    model = Layers()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dmuon.dedicate_params(model, mesh, predicate=lambda name, param: "_proj" in name)
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    for uses in (True, False):
        optimizer.zero_grad()
        model(torch.randn(4, 6), uses).square().mean().backward()
        optimizer.step()
        found = optimizer.metrics()
        assert found["update_rms/layers.0.a_proj.weight"] > 0.1
        assert (found["update_rms/layers.0.b_proj.weight"] > 0.1) == uses
        assert found["idle_share/layers.0.b_proj.weight"] == (not uses)


def test_there_is_no_update_where_nobody_had_a_gradient(ranks):
    ranks(2, where_nobody_had_a_gradient)
