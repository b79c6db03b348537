"""torchtitan's Trainer, and its own parallelize function, containers and clipping, against one process.

torchtitan takes the device's kind when it is imported, and "cuda" where there is none; its models take
FlexAttention, whose CPU form is compiled for a minute. Here meshes are of CPUs, and attention is torch's.
Its Trainer asks GPUs for their memory, and for a barrier in which to change timeouts: `on_cpu` answers.
"""

import contextlib
import dataclasses
import itertools
import os
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from dmuon.integrations.torchtitan import MuonContainer, dedicating, with_muon
from programs import VOCABULARY, dedicated_names, difference, note, tokens_of, train_alone, whole_weights

STEPS, WIDTH = 3, 16


def configuration(parallelism: ParallelismConfig) -> Any:
    config = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2,
            dim=WIDTH,
            n_heads=4,
            hidden_dim=24,
            fuse_qkv=False,
            rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=10000, scaling="none"),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


def loss_on(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1], positions=None)
    if isinstance(logits, DTensor):  # under tensor parallelism
        logits = logits.full_tensor()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def sum_in_gloo(model: nn.Module) -> None:
    """Else FSDP2 scales inside of the reductions, which gloo cannot."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class Run:
    """As Trainer sets up and trains: the model on meta, sharded, initialised, and then its optimizer."""

    def __init__(self, sizes: dict[str, int], *, muon: bool = True, backend: Any = "partial_dtensor") -> None:
        self.parallelism = ParallelismConfig(spmd_backend=backend, **sizes)
        dist_utils.set_spmd_backend(backend)
        training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
        spec = llama3.parallelize_llama
        with mock.patch.object(parallel_dims, "device_type", "cpu"):
            self.dims = ParallelDims.from_config(self.parallelism, dist.get_world_size())
            self.dims.build_mesh()
        with torch.device("meta"):
            self.model = configuration(self.parallelism).build()
        self.model = (dedicating(spec) if muon else spec)(
            self.model,
            parallel_dims=self.dims,
            training=training,
            parallelism=self.parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
        sum_in_gloo(self.model)
        self.model.to_empty(device="cpu")
        torch.manual_seed(3)
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
        self.model.train()
        settings = {"lr": 0.02, "adamw_lr": 1e-3}
        config = MuonContainer.Config(settings=settings) if muon else default_adamw(lr=1e-3)
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)

    def step(self, step: int) -> tuple[float, float]:
        """Its loss over all ranks, and the norm of its gradient."""
        self.optimizers.zero_grad()
        tp = self.dims.tp
        replica, replicas = dist.get_rank() // tp, dist.get_world_size() // tp
        loss = loss_on(self.model, tokens_of(10 * step + replica)) / (12 * replicas)
        loss.backward()
        params = list(self.model.parameters())
        norm = dist_utils.clip_grad_norm_(params, 0.5, foreach=True)
        self.optimizers.step()
        self.schedulers.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / tp, norm.item()

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizers.state_dict(),
            "schedulers": self.schedulers.state_dict(),
        }


def warming_up(step: int, optimizer: Any) -> None:
    """The oracle's learning rates: half in the first step, then whole for a while."""
    optimizer.lr, optimizer.adamw.param_groups[0]["lr"] = 0.02, 1e-3


def trained(sizes: dict[str, int]) -> dict[str, Any]:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    run = Run(sizes)
    start = configuration(run.parallelism).build()
    start.load_state_dict(whole_weights(run.model), strict=False)
    first = []
    for step in range(STEPS):
        if step == 2:
            dcp.save(run.state(), checkpoint_id=folder[0])
        first.append(run.step(step))
    weights = whole_weights(run.model)
    replicas = dist.get_world_size() // run.dims.tp
    batches = [[tokens_of(10 * step + r) for r in range(replicas)] for step in range(STEPS)]
    expected, norms = train_alone(
        start,
        dedicated_names(run.model),
        batches,
        loss=lambda model, tokens: loss_on(model, tokens) / 12,
        max_norm=0.5,
        after_step=warming_up,
        lr=0.01,
        adamw_lr=5e-4,
    )
    other = Run(sizes)
    state = other.state()
    dcp.load(state, checkpoint_id=folder[0])
    other.model.load_state_dict(state["model"])
    other.optimizers.load_state_dict(state["optimizer"])
    other.schedulers.load_state_dict(state["schedulers"])
    other.step(2)
    plain = Run(sizes, muon=False)
    one, two = first[0], plain.step(0)
    return {
        "first loss": abs(one[0] - two[0]),
        "first norm": abs(one[1] - two[1]),
        "trained": difference(weights, expected),
        "norms": max(abs(mine[1] - norm) for mine, norm in zip(first, norms, strict=True)),
        "resumed": difference(whole_weights(other.model), weights),
        "dedicated": len(dedicated_names(run.model)),
    }


@pytest.mark.always("fsdp")
@pytest.mark.parametrize(
    "sizes",
    [
        {"data_parallel_shard_degree": 2},
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
        {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    ],
    ids=["fsdp", "hsdp", "tp"],
)
def test_training(ranks, sizes):
    world = 1
    for size in sizes.values():
        world *= size
    results = ranks(world, trained, sizes, timeout=150)
    assert {found.pop("dedicated") for found in results} == {14}
    kind = {4: "HSDP"}.get(world, "FSDP2") if "tensor_parallel_degree" not in sizes else "FSDP2 x TP"
    note("torchtitan", f"partial_dtensor, {kind}", results[0])
    for found in results:
        assert found["first loss"] <= 1e-5, found
        assert found["trained"] <= 1e-5, found
        assert found["norms"] <= 1e-5, found
        assert found["resumed"] <= 1e-6, found


def pipelined() -> dict[str, Any]:
    """Two stages on two ranks each, by torchtitan's own `pipeline_llm`."""
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        pipeline_parallel_degree=2,
        data_parallel_shard_degree=2,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
    )
    dist_utils.set_spmd_backend("partial_dtensor")
    training = TrainingConfig(
        mixed_precision_param="float32", mixed_precision_reduce="float32", local_batch_size=2
    )
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
    config = configuration(parallelism)
    with torch.device("meta"):
        model = config.build()

    def loss(logits: torch.Tensor, tokens: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, dict]:
        labels = tokens[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / 24, {}

    schedule, parts, has_first, has_last = pipeline_llm(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=dedicating(llama3.parallelize_llama),
        loss_fn=loss,
    )
    for part in parts:
        sum_in_gloo(part)
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    optimizers = MuonContainer.Config(settings={"lr": 0.02, "adamw_lr": 1e-3}).build(model_parts=parts)
    start = configuration(parallelism).build()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, [whole_weights(part) for part in parts])
    start.load_state_dict({k: v for parts_ in everything for w in parts_ for k, v in w.items()}, strict=False)
    replica = dims.get_mesh("fsdp").get_local_rank()
    batches, norms = [], []
    for step in range(2):
        both = [tokens_of(10 * step + r) for r in range(2)]
        batches.append(both)
        optimizers.zero_grad()
        schedule.step(
            *([both[replica][:, :-1]] if has_first else []),
            target=both[replica] if has_last else None,
            losses=[] if has_last else None,
            return_outputs=False,
        )
        params = [param for part in parts for param in part.parameters()]
        norms.append(
            float(dist_utils.clip_grad_norm_(params, 0.5, foreach=True, pp_mesh=dims.get_mesh("pp")))
        )
        optimizers.step()
    mine = {name: value for part in parts for name, value in whole_weights(part).items()}
    chosen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, [name for part in parts for name in dedicated_names(part)])
    expected, right = train_alone(
        start,
        {name for names in chosen for name in names},
        batches,
        loss=lambda model, tokens: loss_on(model, tokens) / 12,
        max_norm=0.5,
    )
    return {
        "trained": difference(mine, {name: expected[name] for name in mine}),
        "norms": max(abs(a - b) for a, b in zip(norms, right, strict=True)),
    }


# The Trainer itself


class Words(BaseTokenizer):
    """Nothing is in words here."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **rest: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Rows(BaseDataLoader):
    """Tokens that the step and the rank determine."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, **rest: Any) -> None:
        self.rank = dp_rank

    def __iter__(self) -> Any:
        for step in itertools.count():
            tokens = tokens_of(10 * step + self.rank)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


def trainer_config(folder: str) -> Trainer.Config:
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=2)
    return Trainer.Config(
        model_spec=dataclasses.replace(llama3.model_registry("debugmodel"), model=configuration(parallelism)),
        tokenizer=Words.Config(),
        dataloader=Rows.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        dump_folder=folder,
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=6,
            steps=2,
            max_norm=0.5,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=parallelism,
        compile=CompileConfig(enable=False),
        activation_checkpoint=None,
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
    )


@contextlib.contextmanager
def on_cpu() -> Any:
    monitor = mock.MagicMock()
    monitor.get_peak_stats.return_value = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}),
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        mock.patch.object(utils, "device_type", "cpu"),
        mock.patch.object(utils, "device_module", torch.cpu),
        mock.patch.object(utils, "get_peak_flops", return_value=1.0),
        mock.patch.object(metrics, "build_device_memory_monitor", return_value=monitor),
        mock.patch.object(dist_utils, "set_pg_timeouts"),
    ):
        yield


def run_trainer(config: Trainer.Config) -> tuple[nn.Module, nn.Module, list[tuple[float, float]]]:
    """The model as it begins, in one process; as it ends; and each step's loss and norm."""
    logged = []
    with on_cpu():
        trainer = Trainer(config)
        trainer.metrics_processor.log = lambda step, mean, most, norm, **rest: logged.append((mean, norm))
        (model,) = trainer.model_parts
        sum_in_gloo(model)
        start = configuration(config.parallelism).build()
        start.load_state_dict(whole_weights(model), strict=False)
        with mock.patch("time.sleep"):
            trainer.train()
        trainer.close()
    return start, model, logged


def trained_by_trainer() -> dict[str, float]:
    config = trainer_config(tempfile.mkdtemp())
    start, model, logged = run_trainer(with_muon(config, lr=0.02, adamw_lr=1e-3))
    expected, norms = train_alone(
        start,
        dedicated_names(model),
        [[tokens_of(10 * step + rank) for rank in range(2)] for step in range(2)],
        loss=lambda model, tokens: loss_on(model, tokens) / 12,
        max_norm=0.5,
        after_step=warming_up,
        lr=0.01,
        adamw_lr=5e-4,
    )
    _, _, plain = run_trainer(trainer_config(tempfile.mkdtemp()))
    return {
        "first loss": abs(logged[0][0] - plain[0][0]),
        "first norm": abs(logged[0][1] - plain[0][1]),
        "trained": difference(whole_weights(model), expected),
        "norms": max(abs(mine - norm) for (_, mine), norm in zip(logged, norms, strict=True)),
    }


def test_trainer(ranks):
    results = ranks(2, trained_by_trainer, timeout=120)
    note("torchtitan", "Trainer, partial_dtensor, FSDP2", results[0])
    for found in results:
        assert max(found.values()) <= 1e-5, found


def without_dmuon() -> None:
    with pytest.raises(ValueError, match="all parameters must be DTensors on the full SPMD mesh"):
        Run({"data_parallel_shard_degree": 2}, muon=False, backend="spmd_types")


@pytest.mark.combination
def test_torchs_fully_shard_does_not_know_spmd_types_yet(ranks):
    ranks(2, without_dmuon)


@pytest.mark.combination
def test_pipelining(ranks):
    results = ranks(4, pipelined, timeout=150)
    note("torchtitan", "partial_dtensor, PP x FSDP2, 1F1B", results[0])
    for found in results:
        assert max(found.values()) <= 1e-5, found


def test_a_config_line():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    with pytest.raises(ValueError, match=r'spmd_backend is "spmd_types".*set it to "partial_dtensor"'):
        with_muon(config)
    parallelism = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    config = with_muon(dataclasses.replace(config, parallelism=parallelism), lr=0.02)
    assert config.optimizer == MuonContainer.Config(settings={"lr": 0.02})
    offloading = dataclasses.replace(config.training, enable_cpu_offload=True)
    with pytest.raises(ValueError, match="enable_cpu_offload"):
        with_muon(dataclasses.replace(config, training=offloading))
    why = "parameters lie over data-parallel dims before fully_shard; set partial_dtensor"
    note("torchtitan", "full_dtensor", why)
    why = "torch 2.13's fully_shard takes no plain parameters there, dmuon or not; set partial_dtensor"
    note("torchtitan", "spmd_types", why)
    note("torchtitan", "enable_cpu_offload", "dedicated parameters stay on the device")
