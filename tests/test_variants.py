"""Relatives of Muon on every layout: equal to one process with separate matrices; their state in files."""

import copy
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuon
import layouts
from dmuon.engine.parameter import local_part
from dmuon.optim.newton_schulz import Settings
from dmuon.optim.parts import Recipe, update_stack
from dmuon.optim.update import check_rule
from dmuon.scratch import Scratch
from reference import ReferenceMuon
from test_stacks import (
    LAYOUTS,
    SETTINGS,
    Mixture,
    assert_equal,
    distribute,
    is_muons,
    loss_of,
    separate,
)

ROWS = "second_momentum_buffer"
GROUP = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": True, "maximize": False}
GROUP["cautious_weight_decay"] = False
WHOLE = StateDictOptions(full_state_dict=True)


class Smoothed(dmuon.Variant):
    """A variant as a user would write it: no momentum; squares of the update per element, once averaged."""

    states: ClassVar = (dmuon.State("squares"), dmuon.State("largest", per="row"))

    def direction(self, gradient, state, rule, live, out):
        out.copy_(gradient)

    def finish(self, orthogonal, state, rule, live):
        matrix = orthogonal.to(state["squares"].dtype)
        dmuon.ema_(state["squares"], matrix.square(), 0.9, live)
        dmuon.ema_(state["largest"], matrix.abs().amax(-1, keepdim=True), 0.5, live)
        return matrix / (state["squares"].sqrt() + 1) / (state["largest"] + 1)


class SmoothedReference(ReferenceMuon):
    def normalised(self, p, orthogonal):
        squares, largest = self.squares.get(p, (torch.zeros(p.shape), torch.zeros(p.shape[0])))
        squares = 0.9 * squares + 0.1 * orthogonal**2
        largest = 0.5 * largest + 0.5 * orthogonal.abs().max(dim=1).values
        self.squares[p] = squares, largest
        return orthogonal / (squares**0.5 + 1) / (largest + 1)[:, None]


def pair(kind: str) -> tuple[dmuon.Variant, type[ReferenceMuon], dict]:
    if kind == "normuon":
        return dmuon.NorMuon(beta2=0.9), ReferenceMuon, {"row_beta": 0.9}
    return Smoothed(), SmoothedReference, {"row_beta": 0.0, "momentum": 0.0, "nesterov": False}


def train(sizes: dict[str, int], kind: str) -> None:
    variant, oracles, wanted = pair(kind)
    settings = {**SETTINGS, "adjust_lr_fn": "match_rms_adamw", "variant": variant}
    torch.manual_seed(0)
    model = Mixture()
    oracle = separate(model)
    reference = oracles(oracle, is_muons, **SETTINGS, scale="match_rms_adamw", **wanted)
    optimizer = distribute(model, sizes, **{k: v for k, v in settings.items() if k not in SETTINGS})
    world, rank = dist.get_world_size() // sizes.get("tp", 1), dist.get_rank() // sizes.get("tp", 1)
    for step in range(4):
        loss_of(model, 100 * step + rank).backward()
        for r in range(world):
            (loss_of(oracle, 100 * step + r) / world).backward()
        if step == 2 and "ep" not in sizes:  # a state of whole tensors
            kept = copy.deepcopy(dmuon.get_optimizer_state_dict(model, optimizer, options=WHOLE))
            if kind == "normuon":
                assert kept["state"]["blocks.0.experts.gate_up"][ROWS].shape == (5, 8)
                assert kept["state"]["blocks.0.qkv.weight"][ROWS].shape == (10,)
            for entry in optimizer.state.values():
                for value in entry.values():
                    local_part(value).zero_()
            dmuon.set_optimizer_state_dict(model, optimizer, kept, options=WHOLE)
        optimizer.step()
        reference.step()
        if kind == "normuon":
            before = copy.deepcopy([local_part(t) for e in optimizer.state.values() for t in e.values()])
            numbers = optimizer.metrics()
            after = [local_part(t) for e in optimizer.state.values() for t in e.values()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            # Of an orthogonal matrix's norm, an update has the RMS 0.2: that of AdamW.
            assert numbers["update_rms/blocks.1.out.weight"] == pytest.approx(0.2, rel=1e-4)
        optimizer.zero_grad()
        reference.zero_grad()
        assert_equal(model, oracle)


@pytest.mark.always("normuon", "own-hsdp2x2", "own-dp2-tp2")
@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("kind", ["normuon", "own"])
def test_training_equals_one_process_with_separate_matrices(ranks, sizes, kind):
    ranks(torch.Size(sizes.values()).numel(), train, sizes, kind)


STRUCTURES = [
    dmuon.Structure(),
    dmuon.Structure(transposed=True),
    dmuon.Structure(sizes=(3, 1), repeats=2),
    dmuon.Structure(sizes=(3, 1), repeats=2, apart=True),
    dmuon.Structure(sizes=(3, 1), repeats=2, apart=True, dim="in"),
    dmuon.Structure(sizes=(5, 3), dim="in", transposed=True),
]


@pytest.mark.parametrize("kind", ["normuon", "own"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_each_matrix_of_a_parameter_has_rows_of_its_own(structure, kind):
    """Two parameters of three stacked elements each: as their matrices one by one."""
    variant = pair(kind)[0]
    rule = check_rule({**GROUP, "adjust_lr_fn": "none"})
    recipe = Recipe(variant, rule, Settings(((3.4, -4.8, 2.0),)), torch.float32, Scratch(reuse=False))
    batch = torch.randn(2, 3, 8, 8)
    state = {
        s.name: torch.rand(
            2, *(batch.shape[1:] if s.per == "element" else structure.row_shape(batch.shape[1:]))
        )
        for s in variant.states
    }
    wanted, kept = batch.clone(), {name: value.clone() for name, value in state.items()}
    counts, begin = structure.row_counts(batch.shape[1:]), 0
    for number, part in enumerate(structure.parts(wanted)):
        matrices = structure.as_matrices(part).clone()
        end = begin + counts[number]
        held = {}
        for s in variant.states:
            if s.per == "element":
                held[s.name] = structure.as_matrices(structure.parts(kept[s.name])[number]).clone()
            else:
                held[s.name] = kept[s.name][..., begin:end].reshape(len(matrices), -1, 1).clone()
        for index in range(len(matrices)):
            one = {name: value[index : index + 1] for name, value in held.items()}
            matrices[index] = variant.finish(matrices[index : index + 1].clone(), one, rule, None)[0]
        structure.write(part, matrices)
        for s in variant.states:
            if s.per == "element":
                structure.write(structure.parts(kept[s.name])[number], held[s.name])
            else:
                kept[s.name][..., begin:end] = held[s.name].view(2, 3, -1)
        begin = end
    recipe.finish(batch, structure, state, None)
    torch.testing.assert_close(batch, wanted)
    torch.testing.assert_close(state, kept)


def rows_on_the_owner() -> None:
    """A state per row is kept by the owner alone, and stays as it is where no rank has a gradient."""
    torch.manual_seed(0)
    model = layouts.Model()
    optimizer = layouts.build(model, {"dp": 2, "tp": 2}, variant=dmuon.NorMuon())
    layouts.loss_of(model, 0).backward()
    optimizer.step()
    idle = model.get_parameter("layers.0.up_proj.weight")
    kept = {name: local_part(value).clone() for name, value in optimizer.state[idle].items()}
    idle.grad._dmuon_count = torch.zeros(1)  # as if no rank had had one
    local_part(idle.grad).zero_()
    optimizer.step()
    for name, value in optimizer.state[idle].items():
        assert torch.equal(local_part(value), kept[name]), name
    for record in dmuon.get_dedicated_params(model):
        rows = optimizer.state[record.resting][ROWS]
        assert rows.shape == ((record.full_shape[0],) if record.is_owner else (0,)), record
        assert rows.dtype == torch.float32
        assert bool(rows.any()) == record.is_owner
    state = dmuon.get_optimizer_state_dict(model, optimizer)["state"]["layers.1.up_proj.weight"]
    assert state[ROWS].shape == (13,)
    with pytest.raises(ValueError, match=r"torch.optim.Muon keeps no \['second_momentum_buffer'\]"):
        dmuon.to_torch_state_dict(dmuon.get_optimizer_state_dict(model, optimizer))
    plain = layouts.Model()
    other = layouts.build(plain, {"dp": 2, "tp": 2})
    with pytest.raises(ValueError, match=r"that of Muon is \['momentum_buffer'\]"):
        other.load_state_dict(optimizer.state_dict())
    other.load_state_dict(other.state_dict())
    # From the first rank alone.
    kept = dmuon.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    before = [local_part(rows).clone() for rows in (e[ROWS] for e in optimizer.state.values() if ROWS in e)]
    for entry in optimizer.state.values():
        for value in entry.values():
            local_part(value).zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dmuon.set_optimizer_state_dict(model, optimizer, kept if dist.get_rank() == 0 else {}, options=options)
    after = [local_part(rows) for rows in (e[ROWS] for e in optimizer.state.values() if ROWS in e)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_state_per_row_lies_with_the_owner(ranks):
    ranks(4, rows_on_the_owner)


class Signed(dmuon.Variant):
    """Works element by element alone, so that teams can have it."""

    states: ClassVar = (dmuon.State("first"), dmuon.State("second", dtype=torch.float64))

    def direction(self, gradient, state, rule, live, out):
        dmuon.ema_(state["first"], gradient, rule.momentum, live)
        dmuon.ema_(state["second"], gradient.square(), 0.9, live)
        out.copy_(state["first"] / (state["second"].sqrt() + 0.01))


def teams() -> None:
    found = []
    for team in ({}, {"tp_distributed_gram": True, "tp_distributed_gram_policy": "always"}):
        torch.manual_seed(0)
        model = layouts.Model()
        optimizer = layouts.build(model, {"dp": 1, "tp": 2}, variant=Signed(), **team)
        for step in range(3):
            if step == 2:
                kept = copy.deepcopy(optimizer.state_dict())
                for entry in optimizer.state.values():
                    for value in entry.values():
                        local_part(value).zero_()
                optimizer.load_state_dict(kept)
                assert optimizer.state[model.layers[0].up_proj.weight]["second"].dtype == torch.float64
            layouts.loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: dmuon.full_tensor(p).detach() for name, p in model.named_parameters()})
    assert any(record.has_team for record in dmuon.get_dedicated_params(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_teams_have_what_works_element_by_element(ranks):
    ranks(2, teams)


def refused() -> None:
    model = layouts.Model()
    layouts.distribute(model, {"dp": 2, "tp": 1})
    with pytest.raises(TypeError, match=r"an instance of dmuon.Variant, such as dmuon.NorMuon\(\)"):
        dmuon.Muon(model, variant=dmuon.NorMuon)
    with pytest.raises(ValueError, match="NorMuon works on whole matrices after Newton-Schulz"):
        dmuon.Muon(model, variant=dmuon.NorMuon(), tp_distributed_gram=True)
    for states, message in (
        ((dmuon.State("a"), dmuon.State("a")), "two states of one name"),
        ((dmuon.State("a", per="column"),), "per 'column'"),
        ((dmuon.State("a", dtype=torch.int64),), "a floating-point one"),
    ):
        wrong = type("Wrong", (dmuon.Variant,), {"states": states})()
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(model, variant=wrong)


def test_what_is_no_variant_is_refused(ranks):
    ranks(2, refused)
    with pytest.raises(ValueError, match="beta2 must be in"):
        dmuon.NorMuon(beta2=1.0)
    with pytest.raises(ValueError, match="eps must be finite and > 0"):
        dmuon.NorMuon(eps=0.0)


def warm_up(step: int) -> float:
    return 0.5 + 0.1 * min(step, 3)


def changing_coefficients(step: int) -> tuple[float, float, float]:
    return (3.4445, -4.7750, 2.0315) if step < 2 else (2.0, -1.5, 0.5)


def functions_of_the_step() -> None:
    torch.manual_seed(0)
    model = Mixture()
    oracle = separate(model)
    reference = ReferenceMuon(oracle, is_muons, **SETTINGS)
    by_step = {"momentum": warm_up, "ns_coefficients": changing_coefficients}
    optimizer = distribute(model, {"dp": 2}, **by_step)
    assert optimizer.param_groups[0]["momentum"] == optimizer.defaults["momentum"] == 0.5
    for step in range(5):
        if step == 3:  # goes on where a state_dict stopped
            kept = copy.deepcopy(optimizer.state_dict())
            assert not any(callable(value) for group in kept["param_groups"] for value in group.values())
            optimizer = dmuon.Muon(model, **SETTINGS, **by_step)
            optimizer.load_state_dict(kept)
        loss_of(model, 100 * step + dist.get_rank()).backward()
        for r in range(2):
            (loss_of(oracle, 100 * step + r) / 2).backward()
        reference.momentum, reference.coefficients = warm_up(step), changing_coefficients(step)
        optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == warm_up(step)
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        assert_equal(model, oracle)
    group = {"params": [model.blocks[0].out.weight], "weight_decay": warm_up}
    with pytest.raises(ValueError, match="weight_decay cannot be a function of the step; only"):
        dmuon.Muon(model, param_groups=[group])
    with pytest.raises(ValueError, match="momentum must be in"):
        dmuon.Muon(model, momentum=lambda step: 1.0 + step)


def test_settings_may_be_functions_of_the_step(ranks):
    ranks(2, functions_of_the_step)


def test_a_stack_of_stacks_is_the_same_as_one_stack():
    variant, rule = dmuon.NorMuon(), check_rule({**GROUP, "adjust_lr_fn": "original"})
    recipe = Recipe(variant, rule, Settings(((3.4, -4.8, 2.0),)), torch.float32, Scratch(reuse=True))
    weight, gradient = torch.randn(2, 2, 3, 8, 6)
    rows = dmuon.Structure().row_shape(weight.shape)
    state = {"momentum_buffer": torch.zeros_like(weight), ROWS: torch.zeros(rows)}
    other = weight.flatten(0, 1).clone()
    flat = {"momentum_buffer": torch.zeros_like(other), ROWS: torch.zeros(6, 8)}
    for _ in range(2):
        update_stack(weight, gradient, state, dmuon.Structure(), recipe)
        update_stack(other, gradient.flatten(0, 1), flat, dmuon.Structure(), recipe)
    assert rows == (2, 3, 8)
    assert torch.equal(weight.flatten(0, 1), other)
    assert torch.equal(state[ROWS].flatten(0, 1), flat[ROWS])
    assert state[ROWS].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_an_average_does_not_depend_on_who_knows_of_the_gradient(dtype):
    """Copies of a weight differ in whether they are given a count: they must not drift apart."""
    torch.manual_seed(1)
    averages = [torch.randn(1000).to(dtype)] * 2
    value = torch.randn(1000).to(dtype)
    known, counted = (average.clone() for average in averages)
    for decay in (0.95, 0.9, 0.3):
        dmuon.ema_(known, value, decay, None)
        dmuon.ema_(counted, value, decay, torch.ones(1))
        assert torch.equal(known, counted), decay
    before = counted.clone()
    dmuon.ema_(counted, value, 0.5, torch.zeros(1))
    assert torch.equal(before, counted)
