"""The state dict helpers: names without wrappers' prefixes; states that do not fit are refused by name."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel

import dmuon
import layouts
from test_resume import Run, assert_same

State = dict[str, Any]
WEIGHT, NORM = "layers.0.mix_proj.weight", "layers.1.norm.bias"
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def test_importing_dmuon_does_not_import_checkpointing():
    script = "import sys, dmuon; assert 'torch.distributed.checkpoint.state_dict' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# What does not fit


def without(*path: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def with_value(*path: Any) -> Callable[[State], None]:
    *path, last, value = path

    def change(state: State) -> None:
        for key in path:
            state = state[key]
        state[last] = value

    return change


def misnamed(state: State) -> None:
    state["state"]["other"] = state["state"].pop(WEIGHT)


def unlisted(state: State) -> None:
    state["param_groups"][1]["params"].remove(WEIGHT)


def apart(state: State) -> None:
    group = state["param_groups"][1]
    state["param_groups"].append({**group, "params": [WEIGHT]})
    group["params"].remove(WEIGHT)


def joined(state: State) -> None:
    first, second, *_ = state["param_groups"]
    second["params"] += first["params"]
    state["param_groups"].remove(first)


FAULTS: dict[str, tuple[Callable[[State], None], type[Exception], str]] = {
    "momentum": (without("state", WEIGHT), RuntimeError, f"missing are {WEIGHT}"),
    "moments": (without("state", NORM), RuntimeError, f"missing are {NORM}"),
    "name": (misnamed, RuntimeError, f"missing are {WEIGHT}; unexpected are other"),
    "stranger": (with_value("state", "other", {}), RuntimeError, "unexpected are other"),
    "all": (with_value("state", {}), RuntimeError, "missing are .*layers.0.down_proj.weight"),
    "entry": (with_value("state", WEIGHT, {}), ValueError, rf"for {WEIGHT} is \[\]"),
    "key": (without("state", NORM, "exp_avg"), ValueError, rf"for {NORM} is \['exp_avg_sq', 'step'\]"),
    "algorithm": (with_value("state", WEIGHT, {"exp_avg": 1}), ValueError, rf"for {WEIGHT} is \['exp_avg'\]"),
    "shape": (
        with_value("state", WEIGHT, "momentum_buffer", torch.zeros(3, 3)),
        ValueError,
        rf"momentum_buffer to load for {WEIGHT} has shape \(3, 3\), it needs \(6, 6\)",
    ),
    "moments' shape": (
        with_value("state", NORM, "exp_avg_sq", torch.zeros(3)),
        ValueError,
        rf"exp_avg_sq to load for {NORM} has shape \(3,\), it needs \(6,\)",
    ),
    "no tensor": (with_value("state", WEIGHT, "momentum_buffer", {}), ValueError, f"{WEIGHT} is {{}}"),
    "unlisted": (unlisted, RuntimeError, f"param_groups do not list {WEIGHT}"),
    "apart": (apart, RuntimeError, f"{WEIGHT} in different parameter groups"),
    "joined": (joined, RuntimeError, "in one parameter group, this optimizer in two"),
    "lr": (
        without("param_groups", 2, "lr"),
        ValueError,
        r"group of embed.weight lacks the settings \['lr'\]",
    ),
    "setting": (
        with_value("param_groups", 1, "dampening", 0.1),
        ValueError,
        r"unknown settings \['dampening'\]",
    ),
    "amsgrad": (with_value("param_groups", 2, "amsgrad", True), ValueError, "amsgrad=True"),
    "eps": (with_value("param_groups", 1, "eps", 1e-3), ValueError, "eps=0.001"),
    "group": (
        with_value("param_groups", 2, "algorithm", "muon"),
        ValueError,
        "is of 'muon', this optim.* 'adamw'",
    ),
}


def refuse_optimizer_states() -> None:
    run = Run({"dp": 2}, 1)
    run.train(range(2))
    good = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    other = Run({"dp": 2}, 2)
    other.train(range(1))
    before = other.snapshot()

    def shallow() -> State:
        entries = {name: dict(entry) for name, entry in good["state"].items()}
        groups = [{**group, "params": list(group["params"])} for group in good["param_groups"]]
        return {"state": entries, "param_groups": groups}

    for change, error, message in FAULTS.values():
        state = shallow()
        change(state)
        with pytest.raises(error, match=message):
            dmuon.set_optimizer_state_dict(other.model, other.optimizer, state)
    assert_same(other.snapshot(), before)
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, shallow())
    # What torch's own functions let pass that far, the optimizer refuses.
    for name in ("entry", "key", "algorithm", "shape", "moments' shape", "no tensor", "lr", "setting", "eps"):
        state = shallow()
        change, error, message = FAULTS[name]
        change(state)
        with pytest.raises(error, match=message):
            torchs.set_optimizer_state_dict(other.model, other.optimizer, state)
    # By number.
    numbered = run.optimizer.state_dict()
    index = numbered["param_groups"][1]["params"][0]
    state = {**numbered, "state": {key: v for key, v in numbered["state"].items() if key != index}}
    with pytest.raises(ValueError, match=f"has nothing for {WEIGHT}"):
        other.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="has 2 parameter groups, this optimizer 3"):
        other.optimizer.load_state_dict({**numbered, "param_groups": numbered["param_groups"][1:]})
    groups = copy.deepcopy(numbered["param_groups"])
    groups[0]["params"].append(groups[2]["params"].pop())
    with pytest.raises(
        ValueError, match=r"group 0 .* has 3 parameters, this optimizer's \(layers.0.up_proj.weight"
    ):
        other.optimizer.load_state_dict({**numbered, "param_groups": groups})
    assert_same(
        {k: v for k, v in other.snapshot().items() if k.endswith("momentum_buffer")},
        {k: v for k, v in run.snapshot().items() if k.endswith("momentum_buffer")},
    )
    # One that never stepped has no state, and is welcome.
    fresh = Run({"dp": 2}, 2)
    other.optimizer.load_state_dict(fresh.optimizer.state_dict())
    assert not any(other.optimizer.state.values())


def test_optimizer_states_that_do_not_fit(ranks):
    ranks(2, refuse_optimizer_states)


def refuse_whole_states() -> list[str]:
    """torch fills in what a full state lacks from the optimizer that it is loaded into."""
    run, other = Run({"dp": 2}, 1), Run({"dp": 2}, 2)
    run.train(range(2))
    other.train(range(1))
    before = other.snapshot()
    messages = []
    for flat in (False, True):
        get = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        good = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=get)
        for broadcast, strict in ((False, True), (True, True), (True, False)):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
            for name in ("entry", "algorithm") if flat else ("entry", "key", "algorithm", "shape"):
                change, error, message = FAULTS[name]
                state = copy.deepcopy(good)
                if flat:
                    moments = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=FULL)["state"]
                    change({"state": moments})
                    state = {key: value for key, value in state.items() if not key.startswith("state.")}
                    state |= {f"state.{n}.{k}": v for n, entry in moments.items() for k, v in entry.items()}
                    if name == "entry":  # nothing is left of it
                        if strict:
                            error, message = RuntimeError, f"missing are {WEIGHT}"
                        else:
                            continue
                else:
                    change(state)
                if broadcast and dist.get_rank() > 0:
                    state = {}
                with pytest.raises(error, match=message) as caught:
                    dmuon.set_optimizer_state_dict(other.model, other.optimizer, state, options=options)
                messages.append(str(caught.value))
        if not flat:  # on one rank alone
            state = copy.deepcopy(good)
            if dist.get_rank() == 1:
                FAULTS["entry"][0](state)
            with pytest.raises(ValueError, match=FAULTS["entry"][2]):
                dmuon.set_optimizer_state_dict(other.model, other.optimizer, state, options=FULL)
    assert_same(other.snapshot(), before)
    return messages


def test_whole_states_that_lack_something(ranks):
    first, second = ranks(2, refuse_whole_states)
    assert first == second


def templates(sizes: layouts.Sizes) -> None:
    """A state dict of an optimizer that never stepped, as `dcp.load` wants it, counts no step: torch's too,
    which makes it by a step of zeros. A first step at rates of zero counts."""
    for get in (dmuon.get_optimizer_state_dict, torchs.get_optimizer_state_dict):
        first, second = Run(sizes, 1), Run(sizes, 1)
        for run in (first, second):
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5  # what torch puts back
        state = get(first.model, first.optimizer)["state"]
        assert all(entry["step"] == 0 for entry in state.values() if "step" in entry)
        assert any("momentum_buffer" in entry for entry in state.values())
        for run in (first, second):
            run.train(range(2))
        assert_same(first.snapshot(), second.snapshot())
    run = Run(sizes, 1)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.train(range(1))
    assert {float(entry["step"]) for entry in run.optimizer.state.values() if "step" in entry} == {1.0}


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 1, "tp": 2}, {"ddp": 2}], ids=str)
def test_a_template_counts_no_step(ranks, sizes):
    ranks(2, templates, sizes)


def refuse_model_states() -> None:
    run, other = Run({"dp": 2}, 1), Run({"dp": 2}, 2)
    before = other.snapshot()
    full = dmuon.get_model_state_dict(run.model, options=FULL)
    misnamed = {("other" if name == WEIGHT else name): value for name, value in full.items()}
    message = f"missing are {WEIGHT}; unexpected are other"
    for options in (FULL, BROADCAST):
        mine = misnamed if options is FULL or dist.get_rank() == 0 else {}
        with pytest.raises(RuntimeError, match=message):
            dmuon.set_model_state_dict(other.model, mine, options=options)
    sharded = dmuon.get_model_state_dict(run.model)
    with pytest.raises(RuntimeError, match="missing are seen"):
        dmuon.set_model_state_dict(other.model, {k: v for k, v in sharded.items() if k != "seen"})
    # Whole on one rank only, and not asked to be broadcast: every rank must say so, not wait.
    with pytest.raises(RuntimeError, match=r"missing are embed\.weight"):
        dmuon.set_model_state_dict(other.model, full if dist.get_rank() == 0 else {}, options=FULL)
    # torch's own function takes the parameter itself for what is missing in a full state dict.
    with pytest.raises(RuntimeError, match=f"holds the very parameter {WEIGHT}"):
        torchs.set_model_state_dict(
            other.model, {name: value for name, value in full.items() if name != WEIGHT}, options=FULL
        )
    assert_same(
        {k: before[k] for k in before if "mix_proj" in k},
        {k: v for k, v in other.snapshot().items() if "mix_proj" in k},
    )


def test_model_states_that_do_not_fit(ranks):
    ranks(2, refuse_model_states)


def leave_out(broadcast: bool) -> None:
    run, other = Run({"dp": 2}, 1), Run({"dp": 2}, 2)
    run.train(range(2))
    other.train(range(1))
    before = other.snapshot()
    full = StateDictOptions(full_state_dict=broadcast)
    model = dmuon.get_model_state_dict(run.model, options=full)
    optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=full)
    expected = run.snapshot()
    left_out = [name for name in model if "up_proj" in name]  # all of the first group
    for name in left_out:
        del model[name], optimizer["state"][name]
    del optimizer["param_groups"][0]
    model["stranger"] = optimizer["state"]["stranger"] = {}
    if broadcast:
        del model["stranger"], optimizer["state"]["stranger"]
        if dist.get_rank() > 0:
            model, optimizer = {}, {}
    options = StateDictOptions(strict=False, full_state_dict=broadcast, broadcast_from_rank0=broadcast)
    answer = dmuon.set_model_state_dict(other.model, model, options=options)
    if not broadcast:
        assert answer.missing_keys == left_out
        assert answer.unexpected_keys == ["stranger"]
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
    for name, value in other.snapshot().items():
        if "up_proj" in name and name.startswith("model."):
            assert torch.equal(value, before[name]), name
        elif name.endswith("up_proj.weight.momentum_buffer"):
            assert before[name].any()
            assert not value.any(), name
        elif isinstance(value, torch.Tensor) and "up_proj" not in name:
            assert torch.equal(value, expected[name]), name
        elif name.startswith("group 0") and name != "group 0 params":
            assert value == before[name], name
        elif name.startswith("group"):
            assert value == expected[name], name
    assert other.train(range(2, 3))


@pytest.mark.parametrize("broadcast", [False, True])
def test_what_may_be_left_out(ranks, broadcast):
    ranks(2, leave_out, broadcast)


# Names


def compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend="eager")


def plain(layer: nn.Module) -> nn.Module:
    return layer


def compiled_outside(layer: nn.Module) -> nn.Module:
    return compiled(checkpoint_wrapper(layer))


def compiled_inside(layer: nn.Module) -> nn.Module:
    return checkpoint_wrapper(compiled(layer))


WRAPS = (plain, compiled, compiled_outside, compiled_inside)


def wrapped(sizes: dict[str, int], seed: int, wrap: Callable[[nn.Module], nn.Module]) -> tuple:
    torch.manual_seed(seed)
    model = layouts.Model()
    names = list(model.state_dict())
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(layer)
    layouts.distribute(model, sizes)
    optimizer = dmuon.Muon(model)
    for step in range(2):
        layouts.loss_of(model, 10 * seed + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, names


def through_wrappers(sizes: dict[str, int], flat: bool) -> None:
    for wrap in WRAPS:
        model, optimizer, names = wrapped(sizes, 1, wrap)
        state = dmuon.get_model_state_dict(model)
        assert list(state) == names if wrap is plain else sorted(state) == sorted(names)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        optimizer_state = dmuon.get_optimizer_state_dict(model, optimizer, options=options)
        if flat:
            assert not any("_orig_mod" in key or "wrapped" in key for key in optimizer_state)
        else:
            listed = [name for group in optimizer_state["param_groups"] for name in group["params"]]
            assert sorted(listed) == sorted(optimizer_state["state"]) == sorted(names)
        for other_wrap in WRAPS:
            other, other_optimizer, _ = wrapped(sizes, 2, other_wrap)
            keys = list(state), list(optimizer_state)
            dmuon.set_model_state_dict(other, state)
            dmuon.set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=options)
            assert keys == (list(state), list(optimizer_state))  # left as they are
            again = dmuon.get_optimizer_state_dict(other, other_optimizer)["state"]
            first = dmuon.get_optimizer_state_dict(model, optimizer)["state"]
            for name, value in dmuon.get_model_state_dict(other).items():
                assert torch.equal(dmuon.full_tensor(value), dmuon.full_tensor(state[name])), name
                for key, moment in first[name].items():
                    assert torch.equal(dmuon.full_tensor(again[name][key]), dmuon.full_tensor(moment)), name


@pytest.mark.always("True")
@pytest.mark.parametrize("flat", [False, True])
def test_names_show_no_wrapper(ranks, flat):
    ranks(1, through_wrappers, {"dp": 1}, flat)


def test_names_show_no_wrapper_under_ddp(ranks):
    ranks(2, through_wrappers, {"ddp": 2}, False)


def inside_ddp() -> None:
    """torch's DistributedDataParallel around the base parameters, and a compiler around that."""
    torch.manual_seed(dist.get_rank())
    model = layouts.Model()
    names = list(model.state_dict())
    mesh = layouts.make_mesh({"ddp": 2})
    dmuon.dedicate_params_ddp(model, mesh["dp"], predicate=layouts.is_proj)
    outer = torch.compile(DistributedDataParallel(model), backend="eager")
    optimizer = dmuon.Muon(outer)
    state = dmuon.get_model_state_dict(outer)
    optimizer_state = dmuon.get_optimizer_state_dict(outer, optimizer)
    assert list(state) == names
    assert sorted(optimizer_state["state"]) == sorted(names)
    doubled = {name: 2 * value for name, value in state.items()}
    dmuon.set_model_state_dict(outer, doubled)
    dmuon.set_optimizer_state_dict(outer, optimizer, optimizer_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, doubled[name]), name
    with pytest.raises(RuntimeError, match=re.escape("missing are head.bias")):
        dmuon.set_model_state_dict(outer, {k: v for k, v in doubled.items() if k != "head.bias"})


def test_names_inside_torchs_ddp(ranks):
    ranks(2, inside_ddp)
