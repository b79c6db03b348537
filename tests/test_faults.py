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
import dmuon.engine.collectives
from layouts import Model, Sizes, build, data_rank, loss_of
from models import full_weights, is_proj
from ranks import Ranks, RanksFailed

pytestmark = pytest.mark.always("exchange-0", "any-3")

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


def arm(phase: str, model: nn.Module, optimizer: dmuon.Muon, generator: random.Random) -> None:
    """Let this process die in `phase`, in the second half of the training, at a moment of the generator's."""
    step = generator.randint(3, STEPS - 1)
    layer = generator.randrange(len(model.layers))
    if phase == "forward":
        model.layers[layer].norm.forward = after(step + 1, model.layers[layer].norm.forward)
    elif phase == "backward":
        counted = after(step + 1, lambda gradient: None)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(counted)

        model.layers[layer].mix_proj.register_forward_hook(hook)
    elif phase == "exchange":
        original = dmuon.engine.collectives.Peers.all_to_all
        dmuon.engine.collectives.Peers.all_to_all = after(4 * step, original)  # there and back, by layer
    elif phase == "step":
        # In a step that no save follows, so that the others come to a collective of ours.
        optimizer._step_adamw = after(5, optimizer._step_adamw)
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


def train(
    sizes: Sizes,
    path: Path,
    phase: str | None = None,
    victim: int = 0,
    seed: int = 0,
    *,
    frozen: bool = False,
) -> dict[str, torch.Tensor]:
    """From the newest checkpoint on; on the victim, until it dies. frozen: the base parameters are."""
    torch.manual_seed(1)
    model = Model()
    for name, param in model.named_parameters():
        param.requires_grad_(is_proj(name, param) or not frozen)
    optimizer = build(model, sizes)
    start = 0
    if steps := saved_steps(path):
        start = steps[-1]
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path / f"step-{start}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mine, _ = data_rank(sizes)
    dying = phase is not None and dist.get_rank() == victim
    generator = random.Random(seed)
    if dying:
        arm(phase, model, optimizer, generator)
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


def survivors_of(ranks: Ranks, sizes: Sizes, path: Path, phase: str, victim: int, **kwargs: Any) -> list[str]:
    """What the others say after the victim's death, all of them within the group's timeout."""
    times = {"group_timeout": GROUP_TIMEOUT, "grace": GROUP_TIMEOUT + 4}
    with pytest.raises(RanksFailed) as caught:
        ranks(4, train, sizes, path, phase, victim, victim, **times, **kwargs)
    sections = dict(re.findall(r"\[rank (\d)\] (.*?)(?=\n\n\[rank|\Z)", str(caught.value), flags=re.S))
    assert "SIGKILL" in sections.pop(str(victim))
    for rank, text in sections.items():
        assert text.startswith("raised"), f"rank {rank}: {text}"
    assert len(sections) == 3
    return list(sections.values())


def goes_on(ranks: Ranks, sizes: Sizes, path: Path, tmp_path: Path, **kwargs: Any) -> None:
    """From the last complete checkpoint, bit for bit as if nothing had happened."""
    (tmp_path / "whole").mkdir()
    uninterrupted = ranks(4, train, sizes, tmp_path / "whole", **kwargs)[0]
    for name, weight in ranks(4, train, sizes, path, **kwargs)[0].items():
        assert torch.equal(weight, uninterrupted[name]), name


@pytest.mark.always("exchange-0")
@pytest.mark.parametrize(
    ("phase", "victim"),
    [("forward", 1), ("backward", 2), ("exchange", 0), ("step", 3), ("save", 1), ("save", 2), ("any", 3)],
)
def test_a_rank_dies(ranks, tmp_path, phase, victim):
    sizes, path = {"dp": 2, "tp": 2}, tmp_path / "run"
    path.mkdir()
    survivors_of(ranks, sizes, path, phase, victim)
    if phase != "any":
        assert 2 in saved_steps(path)  # a complete checkpoint from before, whatever came after
    goes_on(ranks, sizes, path, tmp_path)


@pytest.mark.always("backward-2")
@pytest.mark.parametrize(("phase", "victim"), [("forward", 1), ("backward", 2), ("step", 3)])
def test_where_all_collectives_are_ours_they_are_named(ranks, tmp_path, phase, victim):
    sizes, path = {"ddp": 4}, tmp_path / "run"
    path.mkdir()
    for text in survivors_of(ranks, sizes, path, phase, victim, frozen=True):
        ours = r"dmuon: the (\w+ of .* over the \d ranks \d|broadcast of|all-reduce of the gradients' norm)"
        assert re.search(ours, text), text
    goes_on(ranks, sizes, path, tmp_path, frozen=True)


def state_dict_on_one_rank() -> None:
    model = Model()
    build(model, {"ddp": 2})
    if dist.get_rank() == 0:
        model.state_dict()


def test_a_state_dict_on_one_rank_alone_is_explained(ranks):
    with pytest.raises(RanksFailed, match="state dicts are read on all ranks") as caught:
        ranks(2, state_dict_on_one_rank, group_timeout=3.0, grace=6.0)
    assert caught.value.failed == [0]
