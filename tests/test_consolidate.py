"""The optimizer's whole state on one rank, for programs that save there alone; whole states are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel

import dmuon
from layouts import Model, Sizes, data_rank, distribute, is_proj, loss_of, make_mesh
from models import full_weights


class Run:
    """torchs: torch's DDP is around the base parameters."""

    def __init__(self, sizes: Sizes, seed: int, torchs: bool) -> None:
        torch.manual_seed(seed)
        self.sizes = sizes
        self.model = Model(hidden=16)
        if torchs:
            dmuon.dedicate_params_ddp(self.model, make_mesh(sizes)["dp"], predicate=is_proj)
            self.wrapped: nn.Module = DistributedDataParallel(self.model)
        else:
            distribute(self.model, sizes)
            self.wrapped = self.model
        self.optimizer = dmuon.Muon(self.wrapped, lr=0.05, adamw_lr=0.01)

    def train(self, steps: range) -> None:
        for step in steps:
            loss_of(self.wrapped, 10 * step + data_rank(self.sizes)[0]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def save_on_one_rank(sizes: Sizes, torchs: bool, path: Path) -> None:
    run = Run(sizes, 1, torchs)
    run.train(range(2))
    weights = dmuon.get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
    run.optimizer.consolidate_state_dict(to=1)
    run.optimizer.param_groups[0]["lr"] = 0.04  # such as by a scheduler: settings are those of now
    if dist.get_rank() == 1:
        torch.save(run.optimizer.state_dict(), path)
    else:
        with pytest.raises(RuntimeError, match="consolidated on rank 1"):
            run.optimizer.state_dict()
    dist.barrier()
    other = Run(sizes, 2, torchs)
    options: Any = StateDictOptions(full_state_dict=True)
    dmuon.set_model_state_dict(other.model, weights, options=options)
    loaded = torch.load(path)
    assert all(type(value) is torch.Tensor for entry in loaded["state"].values() for value in entry.values())
    other.optimizer.load_state_dict(loaded)
    assert other.optimizer.param_groups[0]["lr"] == 0.04
    for each in (run, other):
        each.train(range(2, 4))
    loaded_weights = full_weights(other.model)
    for name, weight in full_weights(run.model).items():
        assert torch.equal(weight, loaded_weights[name]), name
    run.optimizer.state_dict()  # on all ranks, again


@pytest.mark.always("torchs_ddp", "dp2-tp2")
@pytest.mark.parametrize(
    ("sizes", "torchs"),
    [
        pytest.param({"ddp": 2}, True, id="torchs_ddp"),
        pytest.param({"ddp": 2}, False, id="ddp2"),
        pytest.param({"replicate": 2, "shard": 2}, False, id="hsdp2x2"),
        pytest.param({"dp": 2, "tp": 2}, False, id="dp2-tp2"),
    ],
)
def test_one_rank_saves_what_all_go_on_from(ranks, sizes, torchs, tmp_path):
    size = torch.tensor(list(sizes.values())).prod().item()
    ranks(size, save_on_one_rank, sizes, torchs, tmp_path / "optimizer.pt")
