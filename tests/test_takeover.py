"""What dmuon writes is what plain torch reads, and the other way round: weights, moments, steps, settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import dmuon
from dmuon import newton_schulz
from layouts import Model, data_rank, distribute, is_proj, make_mesh, parallelize, shard
from test_resume import SAVERS, whole

pytestmark = pytest.mark.always("dp2-tp2", "ddp4", "dp4-True")

Sizes = dict[str, int]

BATCH, SAVED, FINAL = 4, 2, 4
MUON = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.2, "nesterov": False, "ns_steps": 4}
ADAMW = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
HIDDEN = 16


def train(model: nn.Module, optimizers: list, steps: range, share: tuple[int, int] = (0, 1)) -> None:
    """On this rank's share of each batch."""
    rank, size = share
    for step in steps:
        x = torch.randn(BATCH, 3, 6, generator=torch.Generator().manual_seed(step))
        target = torch.randn(BATCH, 3, 3, generator=torch.Generator().manual_seed(100 + step))
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        (model(x[mine]) - target[mine]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def snapshot(model: nn.Module, optimizers: Any) -> dict[str, torch.Tensor]:
    """Weights, momentum, moments and steps, whole and by name."""
    found = {name: whole(value) for name, value in dmuon.get_model_state_dict(model).items()}
    for name, entry in dmuon.get_optimizer_state_dict(model, optimizers)["state"].items():
        found |= {f"{name} {key}": whole(value) for key, value in entry.items()}
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference}"


# torch.optim.Muon and AdamW on plain FSDP2


def in_float32(matrix: torch.Tensor, coefficients: tuple, steps: int, eps: float) -> torch.Tensor:
    """What torch's kernel computes in bfloat16, of a whole matrix (on one rank)."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    assert local.shape == matrix.shape
    result = newton_schulz(local, steps=steps, coefficients=coefficients, eps=eps, dtype=torch.float32)
    return DTensor.from_local(result, matrix.device_mesh, matrix.placements)


def plain_torch(seed: int) -> tuple[nn.Module, list]:
    """On one rank, where FSDP2 leaves matrices whole."""
    torch.manual_seed(seed)
    model = Model(hidden=HIDDEN)
    shard(model, make_mesh({"dp": dist.get_world_size()}))
    named = list(model.named_parameters())
    muon = torch.optim.Muon([p for n, p in named if is_proj(n, p)], **MUON)
    return model, [muon, torch.optim.AdamW([p for n, p in named if not is_proj(n, p)], **ADAMW)]


def torch_saves(path: Path) -> tuple:
    model, optimizers = plain_torch(1)
    train(model, optimizers, range(SAVED))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
    }
    dcp.save(state, checkpoint_id=path)
    saved = snapshot(model, optimizers)
    train(model, optimizers, range(SAVED, FINAL))
    return saved, snapshot(model, optimizers)


def torch_resumes(path: Path) -> tuple:
    """By torch's functions alone."""
    model, optimizers = plain_torch(2)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizers, state["optimizer"])
    loaded = snapshot(model, optimizers)
    settings = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in optimizers]
    train(model, optimizers, range(SAVED, FINAL))
    return loaded, settings, snapshot(model, optimizers)


def with_float32_kernel(fn: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float32)
        return fn(*args)


# dmuon


def build(sizes: Sizes, seed: int, **settings: Any) -> tuple[nn.Module, dmuon.Muon]:
    torch.manual_seed(seed)
    model = Model(hidden=HIDDEN)
    distribute(model, sizes)
    return model, dmuon.Muon(model, **settings)


def dmuon_resumes(sizes: Sizes, path: Path, by_torch: bool) -> tuple:
    """by_torch: by torch's functions, instead of ours of the same name."""
    functions: Any = torchs if by_torch else dmuon
    model, optimizer = build(sizes, 2)
    state = {
        "model": functions.get_model_state_dict(model),
        "optimizer": dmuon.to_torch_state_dict(functions.get_optimizer_state_dict(model, optimizer)),
    }
    dcp.load(state, checkpoint_id=path)
    functions.set_model_state_dict(model, state["model"])
    functions.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = snapshot(model, optimizer)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    train(model, [optimizer], range(SAVED, FINAL), data_rank(sizes))
    return loaded, settings, snapshot(model, optimizer)


def dmuon_saves(sizes: Sizes, path: Path) -> tuple:
    adamw = {f"adamw_{key}": value for key, value in ADAMW.items()}
    model, optimizer = build(sizes, 1, **MUON, **adamw)
    train(model, [optimizer], range(SAVED), data_rank(sizes))
    state = {
        "model": dmuon.get_model_state_dict(model),
        "optimizer": dmuon.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)
    saved = snapshot(model, optimizer)
    train(model, [optimizer], range(SAVED, FINAL), data_rank(sizes))
    return saved, snapshot(model, optimizer)


@pytest.mark.always("dp4-True", "ddp4-False")
@pytest.mark.parametrize(("name", "by_torch"), [*((name, False) for name in SAVERS), ("dp4", True)])
def test_taking_over_from_torch(ranks, name, by_torch, tmp_path):
    saved, end = ranks(1, with_float32_kernel, torch_saves, tmp_path)[0]
    loaded, settings, finally_ = ranks(4, dmuon_resumes, SAVERS[name], tmp_path, by_torch)[0]
    assert_close(loaded, saved, 0)
    assert_close(finally_, end, 1e-5)
    muon, adamw = settings
    assert {key: muon[key] for key in MUON} == MUON
    assert {key: adamw[key] for key in ADAMW} == ADAMW
    assert (muon["algorithm"], adamw["algorithm"]) == ("muon", "adamw")
    assert "eps" not in muon
    assert muon["ns_coefficients"] == "quintic"  # the same as torch's triple


@pytest.mark.always("dp2-tp2")
@pytest.mark.parametrize("name", SAVERS)
def test_and_back_to_torch(ranks, name, tmp_path):
    saved, end = ranks(4, dmuon_saves, SAVERS[name], tmp_path)[0]
    loaded, settings, finally_ = ranks(1, with_float32_kernel, torch_resumes, tmp_path)[0]
    assert_close(loaded, saved, 0)
    assert_close(finally_, end, 1e-5)
    muon, adamw = settings
    assert {key: muon[key] for key in MUON} == MUON
    assert {key: adamw[key] for key in ADAMW} == ADAMW


def take_over_whole(options: StateDictOptions) -> None:
    """A full state dict of torch's, on one rank or on all."""
    plain, optimizers = plain_torch(1)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.07
    model_state = get_model_state_dict(plain, options=StateDictOptions(full_state_dict=True))
    state = get_optimizer_state_dict(plain, optimizers, options=StateDictOptions(full_state_dict=True))
    model, optimizer = build({"dp": dist.get_world_size()}, 2)
    if options.broadcast_from_rank0 and dist.get_rank() > 0:
        model_state, state = {}, {}
    dmuon.set_model_state_dict(model, model_state, options=options)
    dmuon.set_optimizer_state_dict(model, optimizer, state, options=options)
    assert_close(snapshot(model, optimizer), snapshot(plain, optimizers), 0)
    muon, adamw = optimizer.param_groups
    assert {key: muon[key] for key in MUON} == {**MUON, "lr": 0.07}
    assert {key: adamw[key] for key in ADAMW} == {**ADAMW, "lr": 0.07}
    train(model, [optimizer], range(1), data_rank({"dp": 2}))


@pytest.mark.always("True")
@pytest.mark.parametrize("broadcast", [False, True])
def test_taking_over_whole_tensors(ranks, broadcast):
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    ranks(2, take_over_whole, options)


# The files


def save_both(sizes: Sizes, ours: Path, theirs: Path) -> None:
    """The same training by dmuon and by plain FSDP2, where AdamW stands for Muon."""
    model, optimizer = build(sizes, 1)
    state = dmuon.to_torch_state_dict(dmuon.get_optimizer_state_dict(model, optimizer))
    moments = {name: entry for name, entry in state["state"].items() if "step" in entry}
    groups = state["param_groups"]
    state = {"state": moments, "param_groups": groups[1:]}
    dcp.save({"model": model.state_dict(), "optimizer": state, "muon": groups[0]}, checkpoint_id=ours)
    torch.manual_seed(1)
    plain = Model(hidden=HIDDEN)
    mesh = make_mesh(sizes)
    if "tp" in sizes:
        parallelize(plain, mesh)
    shard(plain, mesh)
    named = list(plain.named_parameters())
    adamw = torch.optim.AdamW([p for n, p in named if not is_proj(n, p)])
    muon = torch.optim.Muon([p for n, p in named if is_proj(n, p)]).param_groups[0]
    muon = {**muon, "params": [n for n, p in named if is_proj(n, p)]}
    state = get_optimizer_state_dict(plain, adamw)
    dcp.save({"model": plain.state_dict(), "optimizer": state, "muon": muon}, checkpoint_id=theirs)


@pytest.mark.parametrize("name", ["dp4", "hsdp", "dp2-tp2"])
def test_files_do_not_tell_who_wrote_them(ranks, name, tmp_path):
    """The same entries, of the same dtype, in the same chunks."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ranks(4, save_both, SAVERS[name], ours, theirs)
    mine, expected = (FileSystemReader(path).read_metadata() for path in (ours, theirs))
    assert mine.state_dict_metadata == expected.state_dict_metadata
    assert mine.planner_data == expected.planner_data


@pytest.mark.always("ddp4")
@pytest.mark.parametrize("name", SAVERS)
def test_a_single_process_reads_them(ranks, name, tmp_path):
    """Without dmuon, without a process group: torch's modules and its AdamW."""
    saved, _ = ranks(4, dmuon_saves, SAVERS[name], tmp_path)[0]
    model = Model(hidden=HIDDEN)
    adamw = torch.optim.AdamW([p for n, p in model.named_parameters() if not is_proj(n, p)])
    moments = get_optimizer_state_dict(model, adamw)["state"]
    state = {"model": get_model_state_dict(model), "optimizer": {"state": moments}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(model, state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    for name, entry in state["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, saved[f"{name} {key}"]), name


def write_whole(sizes: Sizes, path: Path) -> dict[str, torch.Tensor]:
    """Whole weights and states on the first rank, in two more formats."""
    model, optimizer = build(sizes, 1)
    train(model, [optimizer], range(1), data_rank(sizes))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dmuon.get_model_state_dict(model, options=options)
    state = dmuon.get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, path / "whole.pt")
    return snapshot(model, optimizer) | {"weights": weights}


@pytest.mark.parametrize("name", SAVERS)
def test_whole_weights_in_other_formats(ranks, name, tmp_path):
    saved = ranks(4, write_whole, SAVERS[name], tmp_path)[0]
    whole_state = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = Model(hidden=HIDDEN)
    assert whole_state["model"].keys() == model.state_dict().keys()
    model.load_state_dict(whole_state["model"])
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key
    for key, entry in whole_state["optimizer"]["state"].items():
        assert all(torch.equal(value, saved[f"{key} {what}"]) for what, value in entry.items())
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(whole_state["model"], tmp_path / "model.safetensors")
    read = safetensors.load_file(tmp_path / "model.safetensors")
    assert read.keys() == whole_state["model"].keys()
    assert all(torch.equal(value, saved[key]) for key, value in read.items())


def write_safetensors(sizes: Sizes, path: Path) -> dict[str, torch.Tensor]:
    """Sharded, by torch's own writer of Hugging Face's format."""
    model, _ = build(sizes, 1)
    names = dict.fromkeys(model.state_dict(), 1)
    writer = dcp.HuggingFaceStorageWriter(
        path=str(path), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
    )
    dcp.save(dmuon.get_model_state_dict(model), storage_writer=writer)
    return {name: whole(value) for name, value in dmuon.get_model_state_dict(model).items()}


@pytest.mark.parametrize("name", SAVERS)
def test_torch_writes_safetensors(ranks, name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    expected = ranks(4, write_safetensors, SAVERS[name], tmp_path)[0]
    files = list(tmp_path.glob("*.safetensors"))
    read: dict[str, torch.Tensor] = {}
    for file in files:
        read |= safetensors.load_file(file)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], value) for key, value in expected.items())
