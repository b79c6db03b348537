"""Lightning's own Trainer and Fabric with dmuon, against one process."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import grad_norm
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import dmuon
from models import Transformer
from programs import dedicated_names, difference, loss_on, note, seeded, tokens_of, train_alone, whole_weights

STEPS = 4
FORMS = {"fsdp": "ModelParallelStrategy, FSDP2", "tp": "ModelParallelStrategy, FSDP2 x TP", "ddp": "ddp"}
Model = partial(Transformer, hidden=14)  # two can divide it
TP_PLAN = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


class TestProcesses(ClusterEnvironment):
    """Lightning takes the processes that there are."""

    __test__ = False
    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def batches_of(replicas: int) -> list[list[torch.Tensor]]:
    """By step: two batches for each replica, whose gradients are accumulated."""
    return [
        [tokens_of(100 * step + 10 * part + replica) for part in range(2) for replica in range(replicas)]
        for step in range(STEPS)
    ]


class Lit(L.LightningModule):
    """What a user writes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.model = seeded(build=Model)
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if dmuon_is_there(self.model):
            return
        if self.form == "ddp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
            dmuon.dedicate_params_ddp(self, mesh)
        else:
            parallelize(self.model, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer = dmuon.Muon(self, lr=0.02, adamw_lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return loss_on(self.model, batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", loss_on(self.model, batch), sync_dist=True)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        norm = dmuon.clip_grad_norm_(
            self, gradient_clip_val
        )  # torch's knows one mesh, without tensor parallelism
        self.norms.append(float(norm))


def dmuon_is_there(model: nn.Module) -> bool:
    return any(isinstance(param, dmuon.engine.owned.OwnedTensor) for param in model.parameters())


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh["tensor_parallel"].size() > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tensor_parallel"], TP_PLAN)
    dp = mesh["data_parallel"]
    dmuon.dedicate_params(model, dp)
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def trainer_of(
    form: str, folder: str, *, full: bool = False, steps: int = STEPS, **options: Any
) -> L.Trainer:
    world = dist.get_world_size()
    if form == "ddp":
        strategy: Any = DDPStrategy()
    else:
        tp = 2 if form == "tp" else 1
        strategy = ModelParallelStrategy(world // tp, tp, save_distributed_checkpoint=not full)
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=[TestProcesses()],
        max_steps=steps,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
        **options,
    )


def mine(form: str, first: int = 0) -> DataLoader:
    """This rank's batches from a step on. (Lightning does not skip what a resumed run has seen.)"""
    tp = 2 if form == "tp" else 1
    replica, replicas = dist.get_rank() // tp, dist.get_world_size() // tp
    batches = [batch for parts in batches_of(replicas)[first:] for batch in parts[replica::replicas]]
    return DataLoader(batches * 4, batch_size=None)


def common_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def halving(step: int, optimizer: Any) -> None:
    """The oracle's learning rates after a step, as `LambdaLR` would set them."""
    optimizer.lr = 0.02 / (2 + step)
    optimizer.adamw.param_groups[0]["lr"] = 1e-3 / (2 + step)


def trained_by_the_trainer(form: str, full: bool) -> dict[str, float]:
    folder = common_folder()
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "full": full}
    start = seeded(build=Model)
    lit = Lit(form)
    trainer = trainer_of(form, folder, limit_val_batches=1, **options)
    trainer.fit(lit, mine(form), mine(form))
    weights = whole_weights(lit.model)
    replicas = dist.get_world_size() // (2 if form == "tp" else 1)
    chosen = {name.removeprefix("model.") for name in dedicated_names(lit)}
    expected, norms = train_alone(
        start,
        chosen,
        batches_of(replicas),
        max_norm=0.5,
        after_step=halving,
    )
    half = Lit(form)
    first = trainer_of(form, folder, steps=2, limit_val_batches=0, **options)
    first.fit(half, mine(form))
    path = str(Path(folder) / "half.ckpt")
    first.save_checkpoint(path)
    resumed = Lit(form)
    second = trainer_of(form, folder, limit_val_batches=0, **options)
    second.fit(resumed, mine(form, 2), ckpt_path=path)
    return {
        "trained": difference(weights, expected),
        "norms": max(abs(a - b) for a, b in zip(norms, lit.norms, strict=True)),
        "resumed": difference(whole_weights(resumed.model), weights),
    }


@pytest.mark.always("fsdp-sharded", "ddp-full")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("form", ["fsdp", "tp", "ddp"])
def test_trainer(ranks, form, full):
    results = ranks(4 if form == "tp" else 2, trained_by_the_trainer, form, full, timeout=120)
    note("lightning", f"Trainer, {FORMS[form]}, {'one file' if full else 'shards'}", results[0])
    for result in results:
        assert result["trained"] <= 1e-5
        assert result["resumed"] <= 1e-6


# Fabric


def fabric_of(form: str, full: bool) -> L.Fabric:
    world = dist.get_world_size()
    tp = 2 if form == "tp" else 1
    strategy: Any = FabricDDP()
    if form != "ddp":
        sizes = (world // tp, tp)
        strategy = FabricModelParallel(parallelize, *sizes, save_distributed_checkpoint=not full)
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[TestProcesses()])
    fabric.launch()
    return fabric


def set_up(fabric: L.Fabric, form: str) -> tuple[nn.Module, Any]:
    """What a user writes."""
    if form == "ddp":
        model = seeded(build=Model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        dmuon.dedicate_params_ddp(model, mesh)
        return fabric.setup(model, dmuon.Muon(model, lr=0.02, adamw_lr=1e-3))
    with fabric.init_module(empty_init=True):
        model = Model()
    torch.manual_seed(5)
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(dmuon.Muon(model, lr=0.02, adamw_lr=1e-3))


def step_of(fabric: L.Fabric, model: nn.Module, optimizer: Any, step: int, replica: int) -> float:
    for part in range(2):
        with fabric.no_backward_sync(model, enabled=part == 0):
            fabric.backward(loss_on(model, tokens_of(100 * step + 10 * part + replica)) / 2)
    norm = dmuon.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def trained_by_fabric(form: str, full: bool) -> dict[str, float]:
    folder = common_folder()
    fabric = fabric_of(form, full)
    tp = 2 if form == "tp" else 1
    replica, replicas = dist.get_rank() // tp, dist.get_world_size() // tp
    model, optimizer = set_up(fabric, form)
    start = Model()
    start.load_state_dict(plain(whole_weights(model)))
    path = str(Path(folder) / "half")
    norms = []
    for step in range(STEPS):
        if step == 2:
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": step})
        norms.append(step_of(fabric, model, optimizer, step, replica))
    weights = plain(whole_weights(model))
    expected, right_norms = train_alone(start, dedicated_names(model), batches_of(replicas), max_norm=0.5)

    model, optimizer = set_up(fabric, form)
    rest = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, rest)
    for step in range(rest["step"], STEPS):
        step_of(fabric, model, optimizer, step, replica)
    return {
        "trained": difference(weights, expected),
        "norms": max(abs(a - b) for a, b in zip(norms, right_norms, strict=True)),
        "resumed": difference(plain(whole_weights(model)), weights),
    }


def plain(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the names of Fabric's wrapper and of torch's DDP."""
    return {
        name.removeprefix("_forward_module.").removeprefix("module."): value
        for name, value in weights.items()
    }


@pytest.mark.always("fsdp-full", "ddp-sharded")
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("form", ["fsdp", "tp", "ddp"])
def test_fabric(ranks, form, full):
    results = ranks(4 if form == "tp" else 2, trained_by_fabric, form, full, timeout=120)
    note("lightning", f"Fabric, {FORMS[form]}, {'one file' if full else 'shards'}", results[0])
    for result in results:
        assert result["trained"] <= 1e-5
        assert result["norms"] <= 1e-5
        assert result["resumed"] <= 1e-6


def norms_of_dtensors() -> None:
    """Lightning's `grad_norm` takes no DTensors, with dmuon or without."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for dedicate in (True, False):
        model = seeded(build=Model)
        if dedicate:
            dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh)
        loss_on(model, tokens_of(0)).backward()
        with pytest.raises(RuntimeError, match="data is not allocated"):
            grad_norm(model, 2)
        assert torch.isfinite(dmuon.clip_grad_norm_(model, float("inf")))


def test_grad_norm(ranks):
    ranks(2, norms_of_dtensors)
    note(
        "lightning", "grad_norm under FSDP2", "by Lightning, of any DTensor; dmuon.clip_grad_norm_ returns it"
    )
