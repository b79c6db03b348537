"""The distributed Gram form: the same update, from pieces that stay where they are."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.optim.distributed_gram import GramUpdate, check_triples
from dmuon.optim.newton_schulz import resolve_coefficients
from layouts import Layer, Model, build, distribute, loss_of
from models import assert_weights_close
from reference import ReferenceMuon, orthogonalize

ALWAYS = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}


def in_pieces(pieces: list[torch.Tensor], by_rows: bool, **settings: Any) -> list[torch.Tensor]:
    """What the ranks do, one after the other."""
    triples = resolve_coefficients(settings.get("coefficients", "quintic"), settings.get("steps", 5))
    forms = [GramUpdate(piece, by_rows, triples) for piece in pieces]
    factor = forms[0].factor(torch.stack([form.gram() for form in forms]).sum(0))
    return [form.orthogonal(factor) for form in forms]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("sizes", [(5, 5), (1, 9, 0), (10,)], ids=str)
@pytest.mark.parametrize("by_rows", [True, False])
def test_equals_newton_schulz_on_the_whole_matrix(by_rows, sizes, scale):
    torch.manual_seed(1)
    matrix = torch.randn(sum(sizes), 4) if by_rows else torch.randn(4, sum(sizes))
    pieces = (scale * matrix).split(sizes, dim=0 if by_rows else 1)
    found = torch.cat(in_pieces(list(pieces), by_rows), dim=0 if by_rows else 1)
    expected = orthogonalize(scale * matrix)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", "you"])
def test_ill_conditioned_matrices(coefficients):
    """As exact as Newton-Schulz on the matrix itself in float64, down to singular values of 1e-6."""
    torch.manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(48, 16, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    matrix = ((u * torch.logspace(0, -6, 16, dtype=torch.float64)) @ v.T).float()
    expected = dmuon.newton_schulz(matrix.double(), coefficients=coefficients)
    found = torch.cat(in_pieces(list(matrix.split(24)), True, coefficients=coefficients))
    assert (found - expected).abs().max() < 1e-6


def test_zero_stays_zero_and_nan_does_not_hide():
    zeros = in_pieces([torch.zeros(4, 2)] * 2, True)
    assert not torch.cat(zeros).any()
    bad = torch.ones(4, 2)
    bad[0, 0] = math.nan
    assert torch.cat(in_pieces([torch.ones(4, 2), bad], True)).isnan().all()


def test_too_many_steps_for_one_gram_matrix_are_refused():
    check_triples(resolve_coefficients("quintic", 8))
    with pytest.raises(ValueError, match="fewer ns_steps"):
        check_triples(resolve_coefficients("quintic", 9))


# Where it is used, and what it moves


class Wide(nn.Module):
    """One layer whose long side is `ratio` times the short one."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(8, int(8 * ratio))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def moved(sizes: dict[str, int], ratio: float, gram: dict[str, Any]) -> dict[str, Any]:
    model = Wide(ratio)
    optimizer = build(model, sizes, **gram)
    runtime = find_runtime(model)
    for _ in range(2):
        runtime.traffic.reset()
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    phases = ("exchange", "publish_exchange")
    total = torch.tensor([runtime.traffic.bytes.get(phase, 0) for phase in phases])
    dist.all_reduce(total)
    return {
        "names": [p.param_name for p in dmuon.get_dedicated_params(model) if p.in_pieces],
        "bytes": total.tolist(),
        "collectives": [runtime.traffic.collectives.get(phase, 0) for phase in phases],
    }


@pytest.mark.always("{'dp': 2, 'tp': 2}-4")
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_used_exactly_where_it_moves_fewer_bytes(ranks, sizes, ratio):
    tp = sizes["tp"]
    never = ranks(4, moved, sizes, ratio, {})[0]
    always = ranks(4, moved, sizes, ratio, ALWAYS)[0]
    chosen = ranks(4, moved, sizes, ratio, {"tp_distributed_gram": True})[0]
    pieces = 3 * (tp - 1) * 4 * (8 * 8 * ratio // tp)  # of float32, up, gate and down
    grams = 3 * (tp - 1) * 8 * (8 * 9 // 2)  # triangles in float64
    assert never["bytes"] == [pieces, pieces]
    assert always["bytes"] == [0, 2 * grams]  # both ways in the publish
    assert not never["names"]
    assert len(always["names"]) == 3
    assert chosen == (always if grams < pieces else never)
    assert ranks(4, moved, sizes, ratio, {**ALWAYS, "tp_distributed_gram": False})[0] == never
    assert ranks(4, moved, sizes, ratio, {**ALWAYS, "tp_distributed_gram_policy": "never"})[0] == never


def short_side_cut(sizes: dict[str, int]) -> list[str]:
    model = Model(width=16, hidden=8)
    build(model, sizes, **ALWAYS)
    return [p.param_name for p in dmuon.get_dedicated_params(model) if p.in_pieces]


def test_a_matrix_cut_by_its_short_side_is_exchanged_whole(ranks):
    assert ranks(4, short_side_cut, {"dp": 2, "tp": 2}) == [[]] * 4


# Beside other settings


def settings_in_groups(sizes: dict[str, int], muon: dict[str, Any], oracle_settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle = copy.deepcopy(model)
    reference = ReferenceMuon(oracle, lambda n, p: "proj" in n and p.ndim == 2, **oracle_settings)
    optimizer = build(model, sizes, **muon, **ALWAYS)
    for step in range(4):
        for m in (model, oracle):
            loss_of(m, step).backward()
        optimizer.step()
        if step == 2:  # the pieces of the first are still on their way
            optimizer.step()
            reference.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.step()
        reference.zero_grad()
    assert_weights_close(model, oracle)


@pytest.mark.parametrize(
    ("muon", "expected"),
    [
        ({"nesterov": False}, {"nesterov": False}),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"scale": "match_rms_adamw"}),
        ({"ns_steps": 3, "weight_decay": 0.1}, {"ns_steps": 3, "weight_decay": 0.1}),
    ],
    ids=["momentum", "scale", "steps"],
)
@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "tp": 2}, {"replicate": 2, "shard": 1, "tp": 2}, {"ddp": 2, "tp": 2}], ids=str
)
@pytest.mark.always("{'dp': 2, 'tp': 2}")
def test_settings(ranks, sizes, muon, expected):
    ranks(4, settings_in_groups, sizes, muon, expected)


def momentum_is_the_same(sizes: dict[str, int]) -> None:
    """In the state dict, whole; also on the way from one form to the other."""
    states = {}
    for name, gram in (("whole", {}), ("pieces", ALWAYS)):
        torch.manual_seed(1)
        model = Model(hidden=16)
        optimizer = build(model, sizes, **gram)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                other = Model(hidden=16)
                other_optimizer = build(other, sizes, **(ALWAYS if name == "whole" else {}))
                other.load_state_dict(model.state_dict())
                other_optimizer.load_state_dict(optimizer.state_dict())
        loss_of(other, 2).backward()
        other_optimizer.step()
        states[name] = get_optimizer_state_dict(model, optimizer)["state"]
        states[name + "'"] = get_optimizer_state_dict(other, other_optimizer)["state"]
    for name, state in states["whole"].items():
        for key, value in state.items():
            for form in ("pieces", "whole'", "pieces'"):
                found = states[form][name][key]
                assert found.placements == value.placements if isinstance(value, DTensor) else True
                difference = (
                    found - value if not isinstance(value, DTensor) else found.to_local() - value.to_local()
                )
                assert difference.numel() == 0 or difference.abs().max() < 1e-6, (form, name, key)


@pytest.mark.always("{'ddp': 2, 'tp': 2}")
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"ddp": 2, "tp": 2}], ids=str)
def test_the_momentum_is_the_same_in_a_state_dict(ranks, sizes):
    ranks(4, momentum_is_the_same, sizes)


def muon_built_late(sizes: dict[str, int]) -> None:
    torch.manual_seed(1)
    model = Model()
    oracle = copy.deepcopy(model)
    reference = ReferenceMuon(oracle, lambda n, p: "proj" in n and p.ndim == 2)
    distribute(model, sizes)
    with torch.no_grad():
        loss_of(model, 0)  # packs the weights before anybody has spoken of pieces
    optimizer = dmuon.Muon(model, **ALWAYS)
    for step in range(2):
        for m in (model, oracle):
            loss_of(m, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert_weights_close(model, oracle)
    loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match="waits for its backward"):
        dmuon.Muon(model)
    loss.backward()


@pytest.mark.always("{'dp': 2, 'tp': 2}")
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"ddp": 2, "tp": 2}], ids=str)
def test_an_optimizer_built_after_a_forward(ranks, sizes):
    ranks(4, muon_built_late, sizes)


def test_the_policy_is_checked(ranks):
    ranks(1, bad_policy)


def bad_policy() -> None:
    model = Model()
    distribute(model, {"dp": 1})
    with pytest.raises(ValueError, match="tp_distributed_gram_policy"):
        dmuon.Muon(model, tp_distributed_gram=True, tp_distributed_gram_policy="often")
    with pytest.raises(ValueError, match="fewer ns_steps"):
        dmuon.Muon(model, ns_steps=12, tp_distributed_gram=True)
    dmuon.Muon(model, ns_steps=12)
