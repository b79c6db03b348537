"""Numbered checkpoints in one folder, written so that an interrupted save never harms the last good one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

COMPLETE_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints under `folder`, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in ascending order."""
        names = (path.name for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for name in names if (match := COMPLETE_NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Write a checkpoint; every rank calls it. It gets its final name only when it is complete."""
        if step in self.steps():  # identical on every rank: all saves end with a barrier
            return
        unfinished = self.path(step).with_suffix(".unfinished")
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed while it saved
        dist.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}
        dcp.save(state, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            unfinished.rename(self.path(step))
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old))
        dist.barrier()

    def load(self, step: int, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Bring model, optimizer and scheduler to the state they had at `step`; every rank calls it.

        The world size and the mesh may differ from those that wrote the checkpoint.
        """
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {
            "model": model_state,
            "optimizer": optimizer_state,
            "scheduler": scheduler.state_dict(),
        }
        dcp.load(state, checkpoint_id=self.path(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
