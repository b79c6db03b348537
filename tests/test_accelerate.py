"""accelerate's own loop with dmuon, against one process.

accelerate takes FSDP for GPUs only, and puts DDP around a model on CPUs. `accelerator_of` lifts that: the
processes pass for those of GPUs while the accelerator is built.
"""

import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from torch.distributed.fsdp import FSDPModule

import dmuon
from dmuon.integrations.accelerate import muon
from models import Transformer
from programs import dedicated_names, difference, loss_on, note, seeded, tokens_of, train_alone, whole_weights

STEPS = 4


def accelerator_of(form: str, *, sizes: Any = None, **options: Any) -> Accelerator:
    """form: "ddp", or the plugin's `state_dict_type`; options: of the plugin."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    processes = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with mock.patch.dict(os.environ, processes):
        if form == "ddp":
            return Accelerator(cpu=True, gradient_accumulation_steps=2)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type=form,
            **options,
        )
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return Accelerator(
            cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin, parallelism_config=sizes
        )


def prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """What a user writes."""
    optimizer = muon(model, lr=0.02, adamw_lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, schedule)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> list:
    norms = []
    for step in steps:
        for part in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_on(model, tokens_of(100 * step + 10 * part + dist.get_rank())))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return norms


def without_ddp(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value for name, value in weights.items()}


def decaying(world: int) -> Any:
    """accelerate steps the schedule once for each process."""

    def after_step(step: int, optimizer: Any) -> None:
        factor = 1 / (1 + world * (step + 1))
        optimizer.lr, optimizer.adamw.param_groups[0]["lr"] = 0.02 * factor, 1e-3 * factor

    return after_step


def trained(form: str, sizes: Any = None, **options: Any) -> dict[str, float]:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    world = dist.get_world_size()
    start = seeded()
    # With efficient loading the other ranks have anything.
    first = seeded(1 if dist.get_rank() == 0 or not options else 7)
    accelerator = accelerator_of(form, sizes=sizes, **options)
    model, optimizer, schedule = prepared(accelerator, first)
    assert isinstance(model, FSDPModule) != (form == "ddp")
    norms = train(accelerator, model, optimizer, schedule, range(2))
    accelerator.save_state(folder[0])
    norms += train(accelerator, model, optimizer, schedule, range(2, STEPS))
    weights = without_ddp(whole_weights(model))
    batches = [
        [tokens_of(100 * step + 10 * part + rank) for part in range(2) for rank in range(world)]
        for step in range(STEPS)
    ]
    expected, right = train_alone(
        start, dedicated_names(model), batches, max_norm=0.5, after_step=decaying(world)
    )

    accelerator = accelerator_of(form, sizes=sizes, **options)
    model, optimizer, schedule = prepared(accelerator, seeded(9))
    accelerator.load_state(folder[0])
    train(accelerator, model, optimizer, schedule, range(2, STEPS))
    return {
        "trained": difference(weights, expected),
        "norms": max(abs(a - b) for a, b in zip(norms, right, strict=True)),
        "resumed": difference(without_ddp(whole_weights(model)), weights),
    }


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("SHARDED_STATE_DICT", {}),
        ("FULL_STATE_DICT", {}),
        ("SHARDED_STATE_DICT", {"cpu_ram_efficient_loading": True}),
        ("ddp", {}),
    ],
    ids=["sharded", "full", "efficient", "ddp"],
)
def test_a_plain_loop(ranks, form, options):
    results = ranks(2, trained, form, timeout=120, **options)
    efficient = ", cpu_ram_efficient_loading" if options else ""
    note("accelerate", "DDP" if form == "ddp" else f"FSDP2, {form}{efficient}", results[0])
    for found in results:
        assert found["trained"] <= 1e-5, found
        assert found["norms"] <= 1e-5, found
        assert found["resumed"] <= 1e-6, found


def trained_on_replicas() -> dict[str, float]:
    return trained("SHARDED_STATE_DICT", ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))


@pytest.mark.combination
def test_hsdp(ranks):
    results = ranks(4, trained_on_replicas, timeout=120)
    note("accelerate", "FSDP2 on dp_replicate x dp_shard", results[0])
    for found in results:
        assert found["trained"] <= 1e-5, found
        assert found["resumed"] <= 1e-6, found


def refused() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(RuntimeError, match="build the Accelerator first"):
        muon(Transformer())
    accelerator_of("SHARDED_STATE_DICT", cpu_offload=True)
    with pytest.raises(ValueError, match="has cpu_offload"):
        muon(Transformer())
    accelerator = accelerator_of("SHARDED_STATE_DICT")
    accelerator.state.fsdp_plugin.fsdp_version = 1
    with pytest.raises(ValueError, match="set up for FSDP; dmuon goes with FSDP2"):
        muon(Transformer())
    accelerator = accelerator_of("SHARDED_STATE_DICT", sizes=ParallelismConfig(dp_shard_size=2))
    accelerator.state.parallelism_config.tp_size = 2  # two ranks are too few for both
    with pytest.raises(ValueError, match="applies tensor parallelism inside prepare"):
        muon(Transformer())
    accelerator = accelerator_of("SHARDED_STATE_DICT")
    model = Transformer()
    with pytest.raises(ValueError, match="they are given by name"):
        muon(model, param_groups=[{"params": [model.norm.weight], "lr": 0.1}])
    # `Muon` itself does not go through prepare, which exchanges parameters by their addresses.
    model = Transformer()
    groups = [{"params": ["norm.weight", "norm.bias"], "lr": 0.5}]
    optimizer = muon(model, param_groups=groups, lr=0.03)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.03, 1e-3]
    with pytest.raises(RuntimeError, match=r"step\(\) before Accelerator.prepare"):
        optimizer.step()
    model, optimizer = accelerator.prepare(model, optimizer)
    names = {id(param): name for name, param in model.named_parameters()}
    in_groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    assert in_groups[0] == ["norm.weight", "norm.bias"]
    assert in_groups[1] == [param.param_name for param in dmuon.get_dedicated_params(model)]


def test_what_is_refused_and_groups(ranks):
    ranks(2, refused)
    note("accelerate", "FSDP1, DeepSpeed, Megatron", "dmuon goes with FSDP2 and DDP")
    note("accelerate", "FSDP2 with cpu_offload", "dedicated parameters stay on the device")
    note("accelerate", "tp_size > 1", "prepare cuts after matrices are dedicated; make the calls yourself")
