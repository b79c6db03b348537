"""dmuon for torchtitan: a config line chooses it.

config = with_muon(llama3_debugmodel(), lr=0.02, adamw_lr=8e-4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from ..api import dedicate_params
from ..checkpoint.sharded import as_sharded
from ..engine.runtime import has_runtime
from ..optim.muon import Muon
from ..selection import Predicate


def with_muon(config: Any, *, predicate: Predicate | None = None, **settings: Any) -> Any:
    """A `Trainer.Config` that trains with `dmuon.Muon`, sharded as before.

    Its model's matrices are dedicated between tensor parallelism and `fully_shard`, in each pipeline stage;
    its optimizer is a `MuonContainer`. Learning rate schedules, clipping and checkpoints stay torchtitan's.

    Args:
        config: of torchtitan's Trainer; left as it is.
        predicate: as for `dedicate_params`.
        settings: of `Muon`, by name.

    Returns:
        The new config.

    Raises:
        ValueError: for `parallelism.spmd_backend` other than "partial_dtensor", under which parameters lie on
            meshes with data-parallel dims before `fully_shard`; and for `training.enable_cpu_offload`.
    """
    _check(config.parallelism, config.training)
    spec = config.model_spec
    spec = dataclasses.replace(spec, parallelize_fn=dedicating(spec.parallelize_fn, predicate))
    return dataclasses.replace(config, model_spec=spec, optimizer=MuonContainer.Config(settings=settings))


def dedicating(parallelize_fn: Callable[..., nn.Module], predicate: Predicate | None = None) -> Callable:
    """A `parallelize_fn` of torchtitan that dedicates matrices between tensor parallelism and `fully_shard`.

    Raises:
        ValueError: when it is called, as `with_muon` and `dedicate_params` do.
    """

    def dedicate(model: nn.Module, mesh: DeviceMesh) -> None:
        dedicate_params(model, mesh, predicate=predicate)

        def init_weights(**options: Any) -> None:
            del model.__dict__["init_weights"]
            with as_sharded(model):  # the random numbers that each rank draws are those of FSDP2's shards
                model.init_weights(**options)  # type: ignore[operator]

        model.__dict__["init_weights"] = init_weights

    def parallelize(model: nn.Module, *, parallel_dims: Any, **rest: Any) -> nn.Module:
        _check(rest["parallelism"], rest["training"])
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh = parallel_dims.get_mesh(names)
        if not parallel_dims.tp_enabled:
            dedicate(model, mesh)
            return parallelize_fn(model, parallel_dims=parallel_dims, **rest)

        def cut_and_dedicate(dims: Any) -> None:
            del model.__dict__["parallelize"]
            model.parallelize(dims)  # type: ignore[operator]
            dedicate(model, mesh)

        # torchtitan calls this method between its other steps, on this one model.
        model.__dict__["parallelize"] = cut_and_dedicate
        model = parallelize_fn(model, parallel_dims=parallel_dims, **rest)
        if not has_runtime(model):
            raise ValueError(
                "this parallelize_fn does not call model.parallelize(parallel_dims): call "
                "dmuon.dedicate_params in it, between tensor parallelism and fully_shard"
            )
        return model

    return parallelize


class MuonContainer(OptimizersContainer):
    """torchtitan's optimizers: one `dmuon.Muon` for each part of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan builds it. `param_groups` and `implementation` are not used."""

        settings: dict[str, Any] = field(default_factory=dict)
        """Of `dmuon.Muon`, by name."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """
        Raises:
            ValueError: for `param_groups` of torchtitan's kind, and what `Muon` refuses.
        """
        if config.param_groups:
            raise ValueError(
                "optimizer.param_groups are of torchtitan's own optimizers: give dmuon's in settings, as "
                '{"param_groups": [{"params": [names], "lr": ...}]}'
            )
        self.model_parts = model_parts
        self.optimizers = [Muon(part, **config.settings) for part in model_parts]
        params = []
        for part, optimizer in zip(model_parts, self.optimizers, strict=True):
            names = {id(param): canonical_fqn(name) for name, param in part.named_parameters()}
            for group in optimizer.param_groups:  # by these names torchtitan saves
                group["param_names"] = [names[id(param)] for param in group["params"]]
                params += group["params"]
        self._validate_params(params)
        self._post_init(params)


def _check(parallelism: Any, training: Any) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f'parallelism.spmd_backend is "{parallelism.spmd_backend}", under which parameters are spread '
            'over the data-parallel dims before fully_shard: set it to "partial_dtensor"'
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload: dedicated parameters and their momentum stay on the device, on "
            "their owners; leave it out"
        )
