"""torch.distributed.checkpoint in its other forms: whole states from one rank, on meta, other files."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from models import Transformer, agreed, backward_both, loss_of, step_both, with_oracle
from programs import difference, note, seeded, whole_weights

Model = partial(Transformer, hidden=14)  # two can divide it
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
MESHES = {
    "dp2": {"dp": 2},
    "hsdp2x2": {"replicate": 2, "shard": 2},
    "dp2-tp2": {"dp": 2, "tp": 2},
    "ddp2": {"ddp": 2},
}


def spread(model: nn.Module, sizes: dict[str, int]) -> nn.Module:
    """Dedicate and shard."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        for layer in model.layers:
            plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
    if "ddp" in sizes:
        dmuon.dedicate_params_ddp(model, mesh["ddp"])
        return dmuon.replicate(model, mesh["ddp"])
    dp = mesh["replicate", "shard"] if "shard" in sizes else mesh["dp"]
    dmuon.dedicate_params(model, dp)
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def of_first_rank(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict()) if dist.get_rank() == 0 else {}


def difference_after_steps(model: nn.Module, start: nn.Module) -> float:
    """From one process that goes on from the weights of `start`."""
    chosen = {param.param_name for param in dmuon.get_dedicated_params(model)}
    oracle, reference = with_oracle(start, lambda name, _: name in chosen)
    optimizer = dmuon.Muon(model)
    for step in range(2):
        backward_both(model, oracle, step)
        step_both(optimizer, reference)
    return difference(whole_weights(model), dict(oracle.named_parameters()))


def loaded_from_the_first_rank(sizes: dict[str, int]) -> dict[str, float]:
    """By torch's own function: before `Muon`, after steps, onto the meta device."""
    goal = seeded(3, Model)
    expected = {name: param.detach().clone() for name, param in goal.named_parameters()}
    found = {}
    model = spread(seeded(dist.get_rank(), Model), sizes)
    set_model_state_dict(model, of_first_rank(goal), options=FROM_FIRST)
    found["before Muon"] = difference(whole_weights(model), expected)
    found["trained"] = difference_after_steps(model, goal)
    set_model_state_dict(model, of_first_rank(goal), options=FROM_FIRST)
    found["after steps"] = difference(whole_weights(model), expected)
    part, not_strict = "layers.1.v_proj", StateDictOptions(**vars(FROM_FIRST) | {"strict": False})
    value = seeded(4, Model).state_dict()[f"{part}.bias"]  # as Lightning does, parameter by parameter
    set_model_state_dict(model.get_submodule(part), {"bias": value}, options=not_strict)
    found["in part"] = difference(whole_weights(model), expected | {f"{part}.bias": value})
    empty = spread(on_meta(), sizes)
    set_model_state_dict(empty, of_first_rank(goal), options=FROM_FIRST)
    found["onto meta"] = difference(whole_weights(empty), expected)
    return found


@pytest.mark.always("dp2-tp2", "ddp2")
@pytest.mark.parametrize("mesh", MESHES)
def test_torch_loads_a_whole_state_from_one_rank(ranks, mesh):
    found = agreed(ranks, MESHES[mesh], loaded_from_the_first_rank)
    note("torch", f"set_model_state_dict(broadcast_from_rank0=True), {mesh}", found)
    assert found.pop("trained") <= 1e-5
    assert set(found.values()) == {0.0}, found


def assigned_onto_meta(sizes: dict[str, int]) -> dict[str, float]:
    """A state dict in shards, and by `load_state_dict(assign=True)`."""
    source = spread(seeded(3, Model), sizes)
    expected = whole_weights(source)
    oracle = seeded(3, Model)
    model = spread(on_meta(), sizes)
    with pytest.raises(RuntimeError, match="is on the meta device"):
        model.load_state_dict(source.state_dict())
    model.load_state_dict(source.state_dict(), assign=True)
    found = {"loaded": difference(whole_weights(model), expected)}
    found["trained"] = difference_after_steps(model, oracle)
    return found


@pytest.mark.always("dp2")
@pytest.mark.parametrize("mesh", ["dp2", "hsdp2x2"])
def test_a_state_is_assigned_to_a_model_on_meta(ranks, mesh):
    found = agreed(ranks, MESHES[mesh], assigned_onto_meta)
    note("torch", f"load_state_dict(assign=True) on meta, {mesh}", found)
    assert found["loaded"] == 0.0
    assert found["trained"] <= 1e-5


def chunks_written_by_hand() -> None:
    """As code for FSDP2's shards would; in between, whole values are written without a word."""
    model = spread(seeded(1, Model), {"dp": 2})
    dmuon.Muon(model)
    param = model.layers[0].q_proj.weight
    with torch.no_grad():
        param.to_local().mul_(1.0)
        assert param.to_local().sum().ndim == 0
        param.to_local().copy_(torch.zeros(param.shape[0] // 2, param.shape[1]))
    with pytest.raises(RuntimeError, match=r"a chunk of layers\.0\.q_proj\.weight .* nothing was written"):
        loss_of(model, 1)
    loss_of(model, 1).backward()


def test_chunks_written_by_hand_are_refused(ranks):
    ranks(2, chunks_written_by_hand)


def written_for_others(sizes: dict[str, int]) -> dict[str, float]:
    """`dcp_to_torch_save` and safetensors, read by a plain model; safetensors read back."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    model = spread(seeded(3, Model), sizes)
    optimizer = dmuon.Muon(model)
    loss_of(model, 1).backward()
    optimizer.step()
    expected = whole_weights(model)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=str(path / "dcp"))
    found = {}
    if dist.get_rank() == 0:
        dcp_to_torch_save(path / "dcp", path / "one.pt")
        plain = Model()
        plain.load_state_dict(torch.load(path / "one.pt"))
        found["dcp_to_torch_save"] = difference(dict(plain.named_parameters()), expected)
    writer = HuggingFaceStorageWriter(
        path=str(path / "hf"), save_distributed=True, enable_consolidation=False
    )
    dcp.save(state, storage_writer=writer)
    other = spread(seeded(5, Model), sizes)
    state = get_model_state_dict(other)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path / "hf")))
    set_model_state_dict(other, state)
    found["safetensors"] = difference(whole_weights(other), expected)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        found["full"] = difference(whole, expected)
    return found


@pytest.mark.parametrize("mesh", ["dp2", "dp2-tp2"])
def test_files_for_others(ranks, mesh):
    sizes = MESHES[mesh]
    world = 4 if "tp" in sizes else 2
    results = ranks(world, written_for_others, sizes)
    note("torch", f"files for others, {mesh}", results[0])
    for found in results:
        assert set(found.values()) == {0.0}, found
