"""Newton-Schulz by teams: the same update, by all who hold pieces of a matrix."""

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import dmuon
from dmuon.engine.runtime import find_runtime
from dmuon.optim.newton_schulz import Settings, resolve_coefficients
from dmuon.optim.team import Team, team_elements, team_operations
from dmuon.ownership import Shareable, busiest_rank, choose_teams, chunks
from layouts import Layer, Model, build, distribute, loss_of
from models import assert_weights_close
from reference import ReferenceMuon, orthogonalize

ALWAYS = {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}


class Threads:
    """A team whose ranks are threads: what `TeamPeers` does, and how many elements they send."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size
        self.sent = [[0, 0] for _ in range(size)]

    def exchange(self, position: int, value: Any) -> list[Any]:
        self.slots[position] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Thread:
    def __init__(self, team: Threads, position: int) -> None:
        self.team, self.position, self.size = team, position, len(team.slots)

    def reduce_scatter(self, addends: torch.Tensor, splits: list[int]) -> torch.Tensor:
        self.team.sent[self.position][0] += sum(splits) - splits[self.position]
        received = self.team.exchange(self.position, addends.split(splits))
        return torch.stack([blocks[self.position] for blocks in received]).sum(0)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self.team.sent[self.position][1] += (self.size - 1) * part.numel()
        return torch.stack(self.team.exchange(self.position, part))


def by_team(size: int, work: Callable[[Thread], Any]) -> tuple[list[Any], Threads]:
    team = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda position: work(Thread(team, position)), range(size))), team


def cut(matrix: torch.Tensor, size: int, dim: int | None = None) -> list[torch.Tensor]:
    rows, cols = matrix.shape
    dim = int(cols > rows) if dim is None else dim
    return list(matrix.split(chunks(matrix.shape[dim], size), dim))


def orthogonal_by_team(matrices: list[torch.Tensor], size: int, **settings: Any) -> list[torch.Tensor]:
    """What a team makes of several matrices at once."""
    triples = resolve_coefficients(settings.pop("coefficients", "quintic"), settings.pop("steps", 5))
    parts, shapes = [cut(matrix, size) for matrix in matrices], [matrix.shape for matrix in matrices]
    team = Team(Settings(triples, **settings))
    found, _ = by_team(
        size, lambda peers: team.orthogonalize([part[peers.position] for part in parts], shapes, peers)
    )
    dims = [int(cols > rows) for rows, cols in shapes]
    return [torch.cat(each, dim) for each, dim in zip(zip(*found, strict=True), dims, strict=True)]


SHAPES = [(4, 10), (10, 4), (4, 10), (5, 5), (1, 7), (7, 1), (2, 9), (3, 3), (1, 1)]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_equals_newton_schulz_on_the_whole_matrix(size, scale):
    """Also with fewer rows than ranks, and ranks whose parts are empty."""
    torch.manual_seed(1)
    matrices = [scale * torch.randn(shape) for shape in SHAPES]
    for matrix, found in zip(matrices, orthogonal_by_team(matrices, size, eps=1e-38), strict=True):
        expected = dmuon.newton_schulz(matrix.double(), eps=1e-38).float()
        assert found.shape == matrix.shape
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 5e-6
        if scale == 1:
            assert (found - orthogonalize(matrix)).abs().max() < 5e-6


def test_in_float64_and_cut_either_way():
    torch.manual_seed(1)
    square = torch.randn(6, 6, dtype=torch.float64)
    team = Team(Settings(resolve_coefficients("polar_express", 6), torch.float64))
    for dim in (0, 1):
        parts = cut(square, 4, dim)
        found, _ = by_team(
            4, lambda p, parts=parts: team.orthogonalize([parts[p.position]], [square.shape], p)[0]
        )
        expected = dmuon.newton_schulz(square, coefficients="polar_express", steps=6)
        assert (torch.cat(found, dim) - expected).abs().max() < 1e-13


def test_matrices_that_are_cut_otherwise_are_not_one_batch():
    """Of one shape, with equal parts on some ranks and not on others."""
    torch.manual_seed(1)
    matrices = [torch.randn(9, 4) for _ in range(3)]
    bounds = [(3, 6, 9), (3, 5, 7), (3, 6, 9)]
    cuts = [
        tuple((slice(a, b), slice(0, 4)) for a, b in zip((0, *ends), (*ends, 9), strict=True))
        for ends in bounds
    ]
    team, shapes = Team(Settings(resolve_coefficients("quintic", 5))), [m.shape for m in matrices]

    def work(peers: Thread) -> list[torch.Tensor]:
        parts = [m[cut[peers.position]] for m, cut in zip(matrices, cuts, strict=True)]
        return team.orthogonalize(parts, shapes, peers, cuts)

    found, _ = by_team(4, work)
    for matrix, parts in zip(matrices, zip(*found, strict=True), strict=True):
        assert (torch.cat(parts) - orthogonalize(matrix)).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", "you"])
def test_ill_conditioned_matrices_come_out_as_by_the_direct_form(coefficients, dtype):
    torch.manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(48, 16, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    spectra = [torch.logspace(0, -k, 16, dtype=torch.float64) for k in (1, 4, 8)]
    matrices = [((u * spectrum) @ v.T).float() for spectrum in spectra]
    matrices += [torch.ones(48, 16), matrices[0].T.contiguous()]
    found = orthogonal_by_team(matrices, 3, coefficients=coefficients, dtype=dtype)
    for matrix, mine in zip(matrices, found, strict=True):
        expected = dmuon.newton_schulz(matrix.double(), coefficients=coefficients)
        direct = dmuon.newton_schulz(matrix, coefficients=coefficients, dtype=dtype, algorithm="direct")
        bound = 2 * (direct - expected).abs().max() + 4 * torch.finfo(dtype).eps
        assert (mine.double() - expected).abs().max() < bound


def test_zero_stays_zero_and_nan_touches_no_other():
    bad, good = torch.ones(4, 2), torch.eye(4)[:, :2]
    bad[0, 0] = math.nan
    zero, nan, fine = orthogonal_by_team([torch.zeros(4, 2), bad, good], 2)
    assert not zero.any()
    assert nan.isnan().all()
    assert (fine - orthogonalize(good)).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (7, 20), (3, 9)])
def test_operations_and_elements_are_those_of_the_formula(shape):
    size, steps, matrix = 4, 5, torch.randn(shape)
    parts, team = cut(matrix, size), Team(Settings(resolve_coefficients("quintic", steps)))

    def count(peers: Thread) -> int:
        with FlopCounterMode(display=False) as counter:
            team.orthogonalize([parts[peers.position]], [matrix.shape], peers)
        return counter.get_total_flops()

    operations, threads = by_team(size, count)
    m, n = sorted(shape)
    rows, cols = -(-m // size), -(-n // size)
    assert (
        operations[0] == steps * (4 * m * m * cols + 2 * m * m * rows) == team_operations(*shape, size, steps)
    )
    assert max(operations) == operations[0]
    reduced, gathered = (sum(each) for each in zip(*threads.sent, strict=True))
    norms = size * (size - 1) * 2
    assert (reduced, gathered - norms) == team_elements(*shape, size, steps)
    assert reduced == steps * (size - 1) * m * m
    assert gathered - norms == steps * 2 * (size - 1) * size * rows * m


# Which matrices have a team


def shareable(position: int, alone: int, together: int | None, row: int = 0) -> Shareable:
    return Shareable(row=row, size=2, position=position, alone=alone, together=together)


def test_a_team_is_for_what_the_busiest_rank_waits_for():
    big = shareable(0, 100, 60)
    assert choose_teams([big]) == {0}
    assert choose_teams([shareable(0, 100, 110)]) == set()
    assert choose_teams([shareable(0, 100, None)]) == set()
    assert choose_teams([big, shareable(1, 100, 60)]) == set()  # enough for all: 120 each
    assert choose_teams([big, shareable(1, 30, 29), shareable(0, 5, 4)]) == {0}  # 65 and 90, from 105
    # A row that is done before the one that all wait for is left alone.
    assert choose_teams([big, shareable(0, 50, 30, row=1)]) == {0}
    assert choose_teams([big, shareable(0, 80, 45, row=1)]) == {0, 1}
    # What every rank does alone counts for all.
    everywhere = Shareable(row=1, size=1, position=0, alone=100, together=None)
    assert choose_teams([big, everywhere]) == set()
    works = [big, shareable(1, 30, 29), shareable(0, 5, 4), everywhere]
    assert [busiest_rank(works, chosen) for chosen in ((), {0}, {0, 2})] == [105, 100, 100]
    assert busiest_rank(works[:3], {0}) == 90


class Wide(nn.Module):
    """One layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, hidden)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def moved(sizes: dict[str, int], width: int, hidden: int, team: dict[str, Any]) -> dict[str, Any]:
    model = Wide(width, hidden)
    optimizer = build(model, sizes, **team)
    runtime = find_runtime(model)
    for _ in range(2):
        runtime.traffic.reset()
        model(torch.ones(3, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
    phases = ("exchange", "publish_exchange", "team_reduce", "team_gather")
    total = torch.tensor([runtime.traffic.bytes.get(phase, 0) for phase in phases])
    dist.all_reduce(total)
    return {
        "names": [p.param_name for p in dmuon.get_dedicated_params(model) if p.has_team],
        "summary": dmuon.summary(model),
        "bytes": total.tolist(),
        "collectives": [runtime.traffic.collectives.get(phase, 0) for phase in phases],
        "momenta": sum(
            optimizer.state[p.resting]["momentum_buffer"].to_local().numel()
            for p in dmuon.get_dedicated_params(model)
            if p.is_cut
        ),
    }


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}], ids=str)
def test_what_teams_send(ranks, sizes):
    """Cut by the long side, nothing but Newton-Schulz; by the short one, pieces of gradient and update too,
    as many as without teams."""
    tp, width, steps = sizes["tp"], 8, 5
    for hidden in (32, 4):
        never, always = (ranks(4, moved, sizes, width, hidden, team) for team in ({}, ALWAYS))
        m, n = sorted((width, hidden))
        pieces = 3 * (tp - 1) * 4 * m * n // tp  # of float32: up, gate and down
        reduce, gather = team_elements(m, n, tp, steps)
        assert never[0]["bytes"] == [pieces, pieces, 0, 0]
        assert not never[0]["names"]
        assert len(always[0]["names"]) == 3
        travels = 0 if hidden > width else pieces
        found = always[0]["bytes"]
        assert found[:2] == [travels, travels]
        assert found[2] == 3 * 4 * reduce
        assert found[3] == 3 * 4 * (gather + tp * (tp - 1) * 2)
        for rank in always:  # one reduce-scatter and two all-gathers a step for all matrices of a row
            assert rank["collectives"][2:] in ([steps, 2 * steps + 1], [0, 0])
            assert rank["momenta"] in (0, *(count * m * n // tp for count in (1, 2, 3)))


@pytest.mark.parametrize(
    ("sizes", "width", "team"),
    [({"dp": 1, "tp": 2}, 8, False), ({"dp": 1, "tp": 2}, 256, True)],
    ids=["small", "large"],
)
def test_the_policy_goes_by_time(ranks, sizes, width, team):
    chosen = ranks(2, moved, sizes, width, 2 * width, {"tp_distributed_gram": True})[0]
    assert bool(chosen["names"]) == team
    assert ("team of rank" in chosen["summary"]) == team
    assert "matrices by teams" in chosen["summary"]
    for off in ({"tp_distributed_gram": False}, {"tp_distributed_gram_policy": "never"}):
        assert not ranks(2, moved, sizes, width, 2 * width, {**ALWAYS, **off})[0]["names"]


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
    dmuon.Muon(model, ns_steps=12, tp_distributed_gram=True)
