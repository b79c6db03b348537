"""A rank dies: the others end, say where, and the training goes on from the last checkpoint."""

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dmuon
import dmuon.comm
import dmuon.optim.muon
from layouts import Model, build, data_rank, loss_of
from models import full_weights
from ranks import RanksFailed

SIZES = {"dp": 2, "tp": 2}
STEPS = 6
GROUP_TIMEOUT = 8.0  # seconds


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which kills the process at its `count`-th call."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            die()
        return fn(*args, **kwargs)

    return counted


def arm(phase: str, model: nn.Module, generator: random.Random) -> None:
    """Let this process die in `phase`, in the second half of the training, at a moment of the generator's."""
    step = generator.randint(3, STEPS - 1)
    layer = generator.randrange(len(model.layers))
    passed = 2 * step  # forwards and backwards of one layer: one a step and one at least for the save
    if phase == "forward":
        model.layers[layer].norm.forward = after(step + 1, model.layers[layer].norm.forward)
    elif phase == "backward":
        counted = after(step + 1, lambda gradient: None)
        model.layers[layer].norm.register_forward_hook(
            lambda module, args, output: output.register_hook(counted) if output.requires_grad else None
        )
    elif phase == "exchange":
        original = dmuon.comm.Channel.all_to_all
        dmuon.comm.Channel.all_to_all = after(passed, original)
    elif phase == "step":
        original = dmuon.optim.muon.apply_update
        dmuon.optim.muon.apply_update = after(3 * step, original)
    elif phase == "any":
        threading.Timer(generator.uniform(0.1, 0.6), die).start()


def save(path: Path, step: int, model: nn.Module, optimizer: dmuon.Muon) -> None:
    """Aside first, under its name when it is complete."""
    unfinished = path / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(path / f"step-{step}")
    dist.barrier()


def saved_steps(path: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in path.glob("step-*"))


def train(path: Path, phase: str | None = None, victim: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """From the newest checkpoint on; on the victim, until it dies."""
    torch.manual_seed(1)
    model = Model()
    optimizer = build(model, SIZES)
    start = 0
    if steps := saved_steps(path):
        start = steps[-1]
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path / f"step-{start}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mine, _ = data_rank(SIZES)
    dying = phase is not None and dist.get_rank() == victim
    generator = random.Random(seed)
    if dying:
        arm(phase, model, generator)
    for step in range(start, STEPS):
        loss_of(model, 10 * step + mine).backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            if dying and phase == "save" and step > 2:
                threading.Timer(generator.uniform(0.0, 0.05), die).start()
            save(path, step + 1, model, optimizer)
    if phase == "any":
        threading.Event().wait(1.0)  # whoever is to die does so here at the latest
        dist.barrier()
    return full_weights(model)


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory) -> dict[str, torch.Tensor]:
    return ranks(4, train, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "backward", "exchange", "step", "save", "any"])
def test_a_rank_dies(ranks, uninterrupted, tmp_path, phase, victim):
    with pytest.raises(RanksFailed) as caught:
        ranks(4, train, tmp_path, phase, victim, victim, group_timeout=GROUP_TIMEOUT, grace=GROUP_TIMEOUT + 4)
    sections = dict(re.findall(r"\[rank (\d)\] (.*?)(?=\n\n\[rank|\Z)", str(caught.value), flags=re.S))
    assert "SIGKILL" in sections.pop(str(victim))
    for rank, text in sections.items():
        assert text.startswith("raised"), f"rank {rank}: {text}"  # within the group's timeout
    assert len(sections) == 3
    if phase in ("forward", "exchange"):  # where it is ours that the others wait for, it is named
        assert any(
            re.search(r"dmuon: the \w+ of group 'layers\.\d'.* over ranks \[", t) for t in sections.values()
        )
    steps = saved_steps(tmp_path)
    assert phase == "any" or steps[0] == 2  # a complete checkpoint from before is there, whatever came after
    for name, weight in ranks(4, train, tmp_path)[0].items():
        assert torch.equal(weight, uninterrupted[name]), name


def state_dict_on_one_rank() -> None:
    model = Model()
    build(model, {"ddp": 2})
    if dist.get_rank() == 0:
        model.state_dict()


def test_a_state_dict_on_one_rank_alone_is_explained(ranks):
    with pytest.raises(RanksFailed, match="state dicts are read on all ranks") as caught:
        ranks(2, state_dict_on_one_rank, group_timeout=3.0, grace=6.0)
    assert caught.value.failed == [0]
