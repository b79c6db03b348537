"""Saved on any layout, resumed on any other, as if nothing had happened; and what plain torch reads of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim.lr_scheduler import LambdaLR

import dmuon
import layouts

pytestmark = pytest.mark.always("dp2-tp2", "ddp4")

Sizes = dict[str, int]
State = dict[str, Any]

BATCH = 4  # sequences in a step, over all ranks
SAVED, FINAL = 2, 4  # steps

SAVERS: dict[str, Sizes] = {
    "dp4": {"dp": 4},
    "hsdp": {"replicate": 2, "shard": 2},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "ddp4": {"ddp": 4},
    "ddp2-tp2": {"ddp": 2, "tp": 2},
}
LOADERS = {**SAVERS, "dp1": {"dp": 1}, "dp2": {"dp": 2}}


class Layer(nn.Module):
    """Matrices that tensor parallelism cuts by rows and by columns, and one that stays frozen."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix_proj = nn.Linear(width, width)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.frozen_proj = nn.Linear(width, width, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix_proj(self.norm(x)) + self.frozen_proj(x)
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


class Model(nn.Module):
    """An embedding tied to the head, a buffer that training changes, a matrix that is never used."""

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        width, vocab = 6, 11
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(2))
        self.idle_proj = nn.Linear(width, 5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens) * (1 + 0.1 * self.seen)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {"up_proj": ColwiseParallel(use_local_output=False), "down_proj": RowwiseParallel()}


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return "proj.weight" in name


def factor(step: int) -> float:
    return 1 / (1 + step)


class Run:
    """A model, its optimizer with a group of its own, and a scheduler, on one layout."""

    def __init__(
        self, sizes: Sizes, seed: int, *, hidden: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(seed)
        self.sizes = sizes
        self.model = Model(hidden, dtype)
        options = {} if dtype == torch.float32 else {"master_dtype": torch.float32}
        mesh = layouts.make_mesh(sizes)
        if "tp" in sizes:
            layouts.parallelize(self.model, mesh, PLAN)
        if "ddp" in sizes:
            tp = "_tp" if "tp" in sizes else ""
            getattr(dmuon, f"dedicate_params_ddp{tp}")(self.model, mesh["dp"], predicate=is_matrix, **options)
            getattr(dmuon, f"replicate{tp}")(self.model, mesh["dp"])
        else:
            layouts.dedicate(self.model, mesh, predicate=is_matrix, **options)
            layouts.shard(self.model, mesh)
        slow = {"params": [f"layers.{i}.up_proj.weight" for i in range(2)], "ns_dtype": torch.float64}
        slow |= {"lr": 0.01, "weight_decay": 0.2, "momentum": 0.9}
        self.optimizer = dmuon.Muon(
            self.model, lr=0.05, weight_decay=0.1, adamw_lr=3e-3, adamw_weight_decay=0.1, param_groups=[slow]
        )
        self.scheduler = LambdaLR(self.optimizer, factor)

    def train(self, steps: range) -> list[float]:
        """The mean losses."""
        losses = []
        tp = self.sizes.get("tp", 1)
        rank, size = dist.get_rank() // tp, dist.get_world_size() // tp
        for step in steps:
            tokens = torch.randint(0, 11, (BATCH, 8), generator=torch.Generator().manual_seed(step))
            tokens = tokens.view(size, -1, 8)[rank]
            logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append((mean / dist.get_world_size()).item())
        return losses

    def state(self) -> State:
        return {
            "model": dmuon.get_model_state_dict(self.model),
            "optimizer": dmuon.get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        dmuon.set_model_state_dict(self.model, state["model"])
        dmuon.set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def snapshot(self) -> dict[str, Any]:
        """Everything, whole and by name."""
        found = {f"model.{name}": whole(v) for name, v in dmuon.get_model_state_dict(self.model).items()}
        state = dmuon.get_optimizer_state_dict(self.model, self.optimizer)
        for name, entry in state["state"].items():
            found |= {f"{name}.{key}": whole(value) for key, value in entry.items()}
        for number, group in enumerate(state["param_groups"]):
            found |= {f"group {number} {key}": value for key, value in group.items()}
        return {**found, "scheduler": self.scheduler.last_epoch, "lr": self.scheduler.get_last_lr()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, name
            continue
        assert found[name].dtype == value.dtype, name
        difference = (found[name].double() - value.double()).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference}"


# The matrix


def save(sizes: Sizes, path: Path, settings: dict[str, Any]) -> tuple:
    """Everything at the save, and losses and everything at the end of the uninterrupted run."""
    run = Run(sizes, 1, **settings)
    run.train(range(SAVED))
    dcp.save(run.state(), checkpoint_id=path)
    saved = run.snapshot()
    losses = run.train(range(SAVED, FINAL))
    return saved, losses, run.snapshot()


def resume(sizes: Sizes, paths: list[Path], settings: dict[str, Any]) -> list[tuple]:
    """The same for each of several checkpoints."""
    results = []
    for path in paths:
        run = Run(sizes, 2, **settings)
        run.load(path)
        loaded = run.snapshot()
        results.append((loaded, run.train(range(SAVED, FINAL)), run.snapshot()))
    return results


def world(sizes: Sizes) -> int:
    return torch.Size(sizes.values()).numel()


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """One run per layout, saved once; its path and what it gave."""
    results = {}
    for name, sizes in SAVERS.items():
        path = tmp_path_factory.mktemp(name)
        results[name] = (path, ranks(4, save, sizes, path, {})[0])
    return results


# Uneven: torch can save and load shards of these, but not cut whole tensors into them.
UNEVEN = {"hidden": 13}
BFLOAT16 = {"dtype": torch.bfloat16}


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize("name", LOADERS)
def test_resuming_anywhere(ranks, saved, name):
    """Nothing is rounded on the way; going on is bitwise the uninterrupted run on the same layout."""
    sizes = LOADERS[name]
    answers = ranks(world(sizes), resume, sizes, [path for path, _ in saved.values()], {})
    for results in answers:
        for (source, (_, (state, losses, end))), (loaded, went, finally_) in zip(
            saved.items(), results, strict=True
        ):
            assert_same(loaded, state)
            tolerance = 0.0 if source == name else 1e-5
            assert_same(finally_, end, tolerance)
            assert went == pytest.approx(losses, abs=tolerance, rel=0)


def test_resuming_with_uneven_pieces(ranks, tmp_path):
    names = ["dp2-tp2", "ddp2-tp2"]
    runs = [ranks(4, save, SAVERS[name], tmp_path / name, UNEVEN)[0] for name in names]
    for other in (*names, "dp4"):
        sizes = LOADERS[other]
        results = ranks(world(sizes), resume, sizes, [tmp_path / name for name in names], UNEVEN)[0]
        for name, (state, losses, end), (loaded, went, finally_) in zip(names, runs, results, strict=True):
            assert_same(loaded, state)
            tolerance = 0.0 if other == name else 1e-5
            assert_same(finally_, end, tolerance)
            assert went == pytest.approx(losses, abs=tolerance, rel=0)


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize("name", SAVERS)
def test_a_bfloat16_model_resumes_unrounded(ranks, name, tmp_path):
    """Its master weights and momentum are float32; computing in bfloat16 differs between layouts."""
    state, losses, end = ranks(4, save, SAVERS[name], tmp_path, BFLOAT16)[0]
    matrices = [name for name in state if name.startswith("model.") and "mix_proj.weight" in name]
    assert matrices
    assert all(not torch.equal(state[m], state[m].bfloat16().float()) for m in matrices)
    for other in ("dp2", name):
        sizes = LOADERS[other]
        loaded, went, finally_ = ranks(world(sizes), resume, sizes, [tmp_path], BFLOAT16)[0][0]
        assert_same(loaded, state)
        if other == name:
            assert_same(finally_, end)
            assert went == losses


def save_while_training(sizes: Sizes, path: Path) -> tuple:
    run = Run(sizes, 1)
    run.train(range(SAVED))
    state = run.snapshot()
    group = dist.new_group(backend="gloo")
    written = dcp.async_save(run.state(), checkpoint_id=path, process_group=group)
    losses = run.train(range(SAVED, FINAL))
    written.result()
    return state, losses, run.snapshot()


@pytest.mark.always("hsdp")
@pytest.mark.parametrize("name", SAVERS)
def test_what_is_saved_asynchronously_is_the_state_of_the_call(ranks, saved, name, tmp_path):
    state, losses, end = ranks(4, save_while_training, SAVERS[name], tmp_path)[0]
    assert_same(state, saved[name][1][0])
    loaded, went, finally_ = ranks(4, resume, SAVERS[name], [tmp_path], {})[0][0]
    assert_same(loaded, state)
    assert_same(finally_, end)
    assert went == losses


def pass_on(sizes: Sizes, broadcast: bool, flat: bool) -> None:
    """From one run to another by whole tensors: the same on every rank, or on the first one's CPU alone."""
    run, other = Run(sizes, 1), Run(sizes, 2)
    run.train(range(SAVED))
    other.train(range(1))  # its weights are gathered, its momentum is another
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast, flatten_optimizer_state_dict=flat)
    model = dmuon.get_model_state_dict(run.model, options=options)
    optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer, options=options)
    optimizer = copy.deepcopy(optimizer)  # torch hands on what is whole already, without copying it
    if broadcast:
        assert bool(model) == (dist.get_rank() == 0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    assert not any(isinstance(value, DTensor) for value in model.values())
    dmuon.set_model_state_dict(other.model, model, options=options)
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    assert_same(other.snapshot(), run.snapshot())
    for mine, theirs in zip(run.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        assert {**mine, "params": 0} == {**theirs, "params": 0}
    assert run.train(range(SAVED, FINAL)) == other.train(range(SAVED, FINAL))
    assert_same(other.snapshot(), run.snapshot())


@pytest.mark.always("dp2-tp2-True", "ddp4-False")
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("name", SAVERS)
def test_whole_tensors(ranks, name, broadcast):
    ranks(4, pass_on, SAVERS[name], broadcast, flat=False)


def test_whole_tensors_in_a_flat_state(ranks):
    ranks(4, pass_on, SAVERS["dp4"], broadcast=False, flat=True)
