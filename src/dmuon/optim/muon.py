"""The optimizer: Muon for dedicated matrices, torch's AdamW for everything else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from ..checkpoint.hooks import first_state, install_optimizer_hooks, whole_state
from ..clip import clip_grad_norm_
from ..engine import fsdp
from ..engine.parameter import DedicatedParam
from ..engine.runtime import find_runtime
from ..inspect import summary
from ..selection import clean_name
from .cautions import warn_of_long_rows, warn_of_rounding
from .groups import (
    at_step,
    check_adamw,
    check_averaged,
    check_dtype,
    check_membership,
    check_muon,
    find_model,
    find_parameters,
    functions_of,
)
from .metrics import measure
from .newton_schulz import Coefficients, Settings, resolve_coefficients
from .owners import owners_update
from .products import Backend, backend_name, check_available, check_backend
from .state import local_state
from .team import TeamPolicy, check_policy, teams_of
from .update import AdjustLR
from .variants import Variant, check_variant

logger = logging.getLogger(__name__)

_FOREACH_SIZE = 32  # DTensors in one foreach operation


class Muon(Optimizer):
    """Muon with one owner per matrix, and AdamW for the rest of the model, as one optimizer.

    A step has four phases:

    1. *Owners update.* For each dedicated matrix that has a gradient, its owner advances the momentum and
       runs Newton-Schulz on the whole matrix. The other ranks do nothing for it, and no collective is issued:
       the gradient came to the owner during backward. Of stacks of experts, every rank does what FSDP2 and
       expert parallelism have left whole with it. Where nobody else keeps the weight, the owner decays
       and updates it, and the next forward gathers the new one.
    2. *Publish*, where somebody else keeps a copy (HSDP and DDP replicas, tensor-parallel pieces): the update
       is left for the publish in front of the weight's next gather, when all who keep it apply it. The first
       groups' are sent now.
    3. *AdamW* updates the base parameters, as `torch.optim.AdamW` would.
    4. With `replicate_async=False`, publish everything and wait for it.

    The update of a matrix is that of `torch.optim.Muon` (see `dmuon.optim.update`) on the gradient averaged
    over all data-parallel ranks. A matrix that no rank had a gradient for is left alone, decay included.

    Build it after `fully_shard`, on all ranks. `param_groups` of the optimizer are ordinary ones, for
    schedulers and logging: each has an entry `algorithm`, "muon" or "adamw". By default there is one of each.

    Args:
        model: the model that went through `dedicate_params`; trainable parameters only are optimized. Or, as
            for torch's optimizers, parameters, `(name, parameter)` pairs or groups of either, collected after
            `fully_shard`: the model is found by them, and no others are optimized. A group of both kinds is
            made two, if it has no settings but a `weight_decay`.
        lr: learning rate of Muon, before the scale of `adjust_lr_fn`.
        momentum: in [0, 1); or a function of the step that returns it, for a warm-up. Steps count from 0, and
            a state_dict has the count.
        weight_decay: decoupled, for dedicated matrices.
        nesterov: Nesterov momentum.
        ns_steps: number of Newton-Schulz iterations.
        ns_coefficients: "quintic", "polar_express", "you", a triple, or a sequence of triples; or a function
            of the step that returns one of these.
        ns_dtype: dtype of Newton-Schulz; by default float32 on CPU and bfloat16 on CUDA.
        adjust_lr_fn: "original" scales the update by sqrt(max(1, rows / cols)), "match_rms_adamw" by
            0.2 sqrt(max(rows, cols)), "spectral" by sqrt(rows / cols), "none" not at all; of the whole
            matrix.
        adamw_lr: learning rate of AdamW.
        adamw_betas: of AdamW.
        adamw_eps: of AdamW.
        adamw_weight_decay: of AdamW, decoupled.
        param_groups: groups with settings of their own, `{"params": [...], "lr": ..., ...}`. `params` holds
            parameters of the model (as it is now, after `fully_shard`) or their names; each group is either
            all dedicated or all base. `lr`, `weight_decay` and the rest are those of the group's algorithm.
            Trainable parameters in no group go to a default group each for Muon and AdamW.
        replicate_async: let `step` return before the new weights are everywhere (the replicas under HSDP and
            DDP, the pieces under tensor parallelism); the next forward, state dict or `dmuon.full_tensor`
            sees to it. The training is the same either way. Code that reads or writes weights itself right
            after a step, such as an average of weights, must call `synchronize` first.
        maximize: ascend instead of descend.
        cautious_weight_decay: decay an element of a dedicated matrix only where the update brings it nearer
            to zero, too (arXiv:2510.12402).
        ns_algorithm: "direct", "gram", or "auto" by operation count.
        momentum_dtype: dtype of the momentum buffers.
        tp_distributed_gram: let the ranks that hold the pieces of a matrix, cut by tensor parallelism, work
            on it as a team: each keeps a part of the gradient and the momentum, and they share Newton-Schulz
            (the direct form, whatever `ns_algorithm`); see `dmuon.optim.team`.
        tp_distributed_gram_policy: "beneficial" does so where the busiest rank is done sooner by it, "always"
            for every cut matrix, "never" for none.
        adamw_fused: use torch's fused AdamW kernel instead of the foreach one; by default on CUDA
            and CPU.
        betas: another name of `adamw_betas`, which frameworks use.
        variant: a relative of Muon, such as `NorMuon()`, or one of your own (see `Variant`); None for Muon
            itself. It belongs to the program, like `momentum_dtype`: only its state is in the state_dict.
        ns_backend: how Newton-Schulz computes products with a symmetric result: "full", "panels", "quack",
            "triton", or "auto" for the fastest on the device; see `dmuon.optim.products`.

    Raises:
        TypeError: for a `model` that is neither a module nor parameters.
        ValueError: for settings out of range, by name; for a model without dedicated parameters; for
            parameters that are not the model's; for base parameters that nothing keeps equal across ranks;
            for a `fully_shard` over other ranks than the dedicated parameters'.
        RuntimeError: if a dedicated parameter has been replaced by another one; for an `ns_backend` that this
            device does not have.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float | torch.Tensor = 0.02,
        momentum: float | Callable[[int], float] = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients | Callable[[int], Coefficients] = "quintic",
        ns_dtype: torch.dtype | None = None,
        adjust_lr_fn: AdjustLR = "original",
        adamw_lr: float | torch.Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        replicate_async: bool = True,
        maximize: bool = False,
        *,
        cautious_weight_decay: bool = False,
        ns_algorithm: str = "auto",
        momentum_dtype: torch.dtype = torch.float32,
        tp_distributed_gram: bool = False,
        tp_distributed_gram_policy: TeamPolicy = "beneficial",
        adamw_fused: bool | None = None,
        ns_backend: Backend = "auto",
        betas: tuple[float, float] | None = None,
        variant: Variant | None = None,
    ) -> None:
        model, given, self._has_names = find_model(model)
        if given is not None and param_groups is not None:
            raise TypeError("param_groups goes with a model; parameters and groups were given in its place")
        adamw_betas = adamw_betas if betas is None else betas
        self._runtime = find_runtime(model)
        self._runtime.check()
        fsdp.reshard(model)
        self._model = model
        self._names = {id(p): clean_name(name) for name, p in model.named_parameters()}
        self._order = {key: place for place, key in enumerate(self._names)}
        self._stacks = {id(stack.param): stack.structure for stack in self._runtime.stacks}
        self._verified = False
        self._complete = False  # the groups are those of the constructor, or more
        self._consolidated: tuple[int, dict] | None = None  # a rank, and there the state of all parameters
        self._functions: list[dict[str, Callable[[int], Any]]] = []  # of the step, by setting, of each group
        self._members: list[Any] | None = None  # of the groups, when they were checked; None: never
        self.replicate_async = replicate_async
        self.momentum_dtype = check_dtype("momentum_dtype", momentum_dtype)
        self.variant = Variant() if variant is None else check_variant(variant)
        self.ns_backend = check_backend(ns_backend)  # of this machine: not in the state_dict
        self._muon_defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "ns_dtype": ns_dtype,
            "ns_algorithm": ns_algorithm,
            "adjust_lr_fn": adjust_lr_fn,
            "maximize": maximize,
            "cautious_weight_decay": cautious_weight_decay,
        }
        self._adamw_defaults = {
            "lr": adamw_lr,
            "betas": adamw_betas,
            "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
            "maximize": maximize,
        }
        has_fused = self._runtime.layout.device.type in ("cpu", "cuda")
        fused = has_fused if adamw_fused is None else adamw_fused
        self._adamw_kernel = {"fused": True} if fused else {"foreach": True}
        self._adamw: AdamW | None = None
        check_muon(at_step(self._muon_defaults, 0))
        check_adamw(self._adamw_defaults)
        team_policy = check_policy(tp_distributed_gram_policy) if tp_distributed_gram else "never"
        if tp_distributed_gram and self.variant.finishes:
            raise ValueError(
                f"tp_distributed_gram: {self.variant.name} works on whole matrices after "
                "Newton-Schulz, and no rank of a team has one. Leave it out."
            )
        check_averaged(model, self._runtime)
        super().__init__(self._complete_groups(param_groups or ()) if given is None else given, {})
        self._complete = True
        # What torch's schedulers ask for (OneCycleLR, CyclicLR), no more: groups have defaults of their own.
        self.defaults = {"momentum": at_step(self._muon_defaults, 0)["momentum"]}
        # Last: all that can be refused has been, on every rank, and the model can still be mended.
        self._runtime.seal()
        settings = self._settings(self._muon_defaults)
        dtype = self._compute_dtype(settings)
        self._teams, what_teams_do = teams_of(team_policy, self._runtime.params, settings, dtype)
        self._runtime.form_teams(self._teams)
        install_optimizer_hooks(self)
        self._runtime.orthogonalization = "; ".join(filter(None, (self._orthogonalization(), what_teams_do)))
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", summary(model))
        warn_of_rounding(self._runtime)
        warn_of_long_rows(self._runtime)

    # Groups

    def _complete_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The user's groups with their parameters looked up, and default groups for what they leave out."""
        if isinstance(groups, (Mapping, str, torch.Tensor)):
            raise ValueError('param_groups must be a sequence of dicts such as {"params": [...], "lr": 0.01}')
        complete = [self._resolve(group) for group in groups]
        taken = {id(param) for group in complete for param in group["params"]}
        rest = [p for _, p in self._model.named_parameters() if p.requires_grad and id(p) not in taken]
        for dedicated in (True, False):
            params = [p for p in rest if self._is_muons(p) == dedicated]
            if params:
                complete.append({"params": params})
        return complete

    def _resolve(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group whose `params` are parameters of the model; they may be given by name."""
        return find_parameters(group, self._model, self._runtime.model, self._names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are all dedicated or all base, and decide its algorithm.

        All ranks call it. Inside the group parameters stand in module order, whatever order they come in (of
        a set, it would differ between ranks).

        Raises:
            ValueError: for mixed groups, unknown or bad settings, and parameters that are not the model's.
            RuntimeError: if the parameters of other groups have been exchanged.
        """
        self._consolidated = None
        if self._complete:
            check_membership(self.param_groups, self._runtime, may_lack=True)
        group = self._resolve(param_group)
        group["params"].sort(key=lambda param: self._order[id(param)])
        dedicated = {self._is_muons(param) for param in group["params"]}
        if len(dedicated) > 1:
            names = [self._names[id(p)] for p in group["params"] if self._is_muons(p)]
            raise ValueError(
                f"a parameter group mixes dedicated parameters ({names[0]}, ...) with others; make it two "
                "groups, whose learning rates are Muon's and AdamW's"
            )
        is_muon = dedicated == {True}
        defaults = self._muon_defaults if is_muon else self._adamw_defaults
        unknown = set(group) - set(defaults) - {"params", "algorithm", "initial_lr", "name", "param_names"}
        if unknown:
            raise ValueError(
                f"unknown settings {sorted(unknown)} in a parameter group of "
                f"{'Muon' if is_muon else 'AdamW'}; known are {sorted(defaults)}"
            )
        group = {**defaults, **group, "algorithm": "muon" if is_muon else "adamw"}
        functions = functions_of(group)
        if functions:
            group = {**at_step(group, 0), "step": 0}
        (check_muon if is_muon else check_adamw)(group)
        if is_muon:
            dtype = self._compute_dtype(self._settings(group))
            check_available(self.ns_backend, dtype, self._runtime.layout.device)
        if self._has_names:  # as torch's optimizers that were given pairs
            group["param_names"] = [self._names[id(param)] for param in group["params"]]
        super().add_param_group(group)
        self._functions.append(functions)
        if not is_muon:  # torch fills in from `defaults`
            self.param_groups[-1].pop("momentum", None)

    def _record(self, param: torch.Tensor) -> DedicatedParam | None:
        return self._runtime.record_of(param)

    def _is_muons(self, param: torch.Tensor) -> bool:
        """Whether Muon trains a parameter: a dedicated one, or a stack that stays with FSDP2."""
        return self._record(param) is not None or id(param) in self._stacks

    def _orthogonalization(self) -> str:
        """For `summary`."""
        dtype = self._compute_dtype(self._settings(self._muon_defaults))
        backend = backend_name(self.ns_backend, dtype, self._runtime.layout.device)
        return f"in {str(dtype).removeprefix('torch.')}, symmetric products: {backend}"

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss, on all ranks.

        Raises:
            RuntimeError: on all ranks, where it would ignore gradients: those that backwards without
                communication have left, or those of a module that has been replaced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._consolidated = None
        self.check_members()
        if self._asks_for_states():
            self.start_state()
            return loss
        self._runtime.prepare_step()
        self._verify_parameters()
        self._set_for_step()
        self._runtime.publish(owners_update(self))
        self._step_adamw()
        if not self.replicate_async:
            self._runtime.synchronize()
        return loss

    def _asks_for_states(self) -> bool:
        """Whether it is torch's `get_optimizer_state_dict` that steps, for the states: first of all, at rates
        of 0, with zeros for gradients. A first step of a warm-up has gradients of a backward. Collective."""
        if self.state or any(float(group["lr"]) for group in self.param_groups):
            return False
        gradients = [p.resting.grad for p in self._runtime.params if p.resting.requires_grad]
        if any(gradient is None or hasattr(gradient, "_dmuon_count") for gradient in gradients):
            return False
        return clip_grad_norm_(self._model, math.inf).item() == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those too that backwards without reduction (`no_sync` and the like) have left
        on the ranks."""
        super().zero_grad(set_to_none)
        self._runtime.drop_unreduced_gradients()

    def synchronize(self) -> None:
        """Bring the last step's update to everyone who keeps a weight, and wait for it; on all ranks.

        With `replicate_async`, whoever reads or writes weights between a step and the next forward by other
        means than ours (an average of weights, a norm for a log) calls this first. Gathers, state dicts and
        `dmuon.full_tensor` see to it by themselves.
        """
        self._runtime.synchronize()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state to one rank, so that it alone may call `state_dict()`; all ranks call this.

        As `ZeroRedundancyOptimizer.consolidate_state_dict`, for programs that save on one rank. From now to
        the next step or load, `state_dict()` of that rank needs no other and shows whole tensors on the CPU;
        that of the other ranks raises RuntimeError. `load_state_dict` takes whole tensors, on all ranks.

        Args:
            to: the rank, of all ranks. It needs the memory of the whole state.
        """
        self._consolidated = None
        state = whole_state(self.state_dict()["state"], keep=dist.get_rank() == to)
        self._consolidated = (to, state)

    @torch.no_grad()
    def metrics(self, groups: Mapping[str, str] | None = None) -> dict[str, float]:
        """What the last step did to each parameter of Muon's; between `step` and `zero_grad`, on all ranks.

        Computed where the matrices lie: it repeats the step's Newton-Schulz, and takes one small collective
        for each dim of the mesh. Nothing is computed or kept unless it is called.

        Args:
            groups: `{"attention": "*.attn.*", ...}`: one entry for all parameters whose names match a
                pattern, instead of one for each parameter.

        Returns:
            `{"gradient_norm/<name>": ..., ...}`, for TensorBoard and the like: `gradient_norm` and
            `momentum_norm`, Frobenius; `update_rms`, of what the learning rate multiplies; `weight_rms`;
            `orthogonality_residual`, ||O O^T - I||_F / sqrt(m) of the orthogonalized matrix O, whose shorter
            side is m (over several matrices, the root of the mean square); `idle_share`, of matrices whose
            gradient is zero, such as experts without tokens.

        Raises:
            RuntimeError: if there is no gradient (any more); on all ranks.
            ValueError: for a pattern that no parameter has.
        """
        self._runtime.synchronize()
        return measure(self, groups)

    def _set_for_step(self) -> None:
        """Settings that are functions of the step get their values for this one, which is counted."""
        for group, functions in zip(self.param_groups, self._functions, strict=True):
            if functions:
                group.update({key: function(group["step"]) for key, function in functions.items()})
                group["step"] += 1

    def _settings(self, group: Mapping[str, Any]) -> Settings:
        """How the matrices of a group are orthogonalized."""
        group = at_step(group, 0)
        triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        return Settings(triples, group["ns_dtype"], group["ns_algorithm"], self.ns_backend)

    def _compute_dtype(self, settings: Settings) -> torch.dtype:
        """Of Newton-Schulz with these settings."""
        return settings.compute_dtype(self.momentum_dtype, self._runtime.layout.device)

    def check_team(self, param: DedicatedParam) -> None:
        """Refuse a momentum that lies otherwise than it should now; see `DedicatedParam.check_team`."""
        param.check_team(param in self._teams)

    def _step_adamw(self) -> None:
        """Phase 3: torch's AdamW on our groups and our state, which a load may have replaced."""
        groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if not groups:
            return
        if self._adamw is None:
            self._adamw = AdamW(groups[0]["params"], **self._adamw_kernel)  # type: ignore[arg-type]
        self._adamw.state = self.state
        self._adamw.param_groups = [
            {**self._adamw.defaults, **group, "lr": float(group["lr"]), "params": params}
            for group in groups
            for params in _taken_at_once(group["params"])
        ]
        self._adamw.step()

    def start_state(self) -> None:
        """Make the state of all that is trainable and has none yet, as it is before the first step: zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                if not param.requires_grad or self.state.get(param):
                    continue
                if group["algorithm"] == "muon":
                    local_state(self, param)
                    continue
                self.state[param] = first_state(self, param, "adamw")
                if "step" in self.state[param] and self._adamw_kernel.get("fused"):
                    self.state[param]["step"] = self.state[param]["step"].to(param.device)

    def check_members(self) -> None:
        """Refuse parameters that somebody has exchanged since the last look, or thawed without adding them;
        collective if any list, or what is frozen, has changed. In every step and state dict.

        Raises:
            RuntimeError: on all ranks; see `check_membership`.
        """
        lists = [group["params"] for group in self.param_groups]
        frozen = [param.resting.requires_grad for param in self._runtime.params]
        members = [lists, ([[id(list_), *map(id, list_)] for list_ in lists], frozen)]  # lists keep their ids
        if self._members is None or self._members[1] != members[1]:
            check_membership(self.param_groups, self._runtime, may_lack=False)
            self._members = members

    def _verify_parameters(self) -> None:
        """Once: the base parameters we were given must still be the model's."""
        if self._verified:
            return
        current = {id(p) for p in self._model.parameters()} | fsdp.managed_parameters(self._model)
        for group in self.param_groups:
            for param in group["params"]:
                if self._record(param) is None and id(param) not in current:
                    raise RuntimeError(
                        f"{self._names[id(param)]} is no longer a parameter of the model, so that updating "
                        "it would change nothing. Call fully_shard (and whatever else replaces parameters) "
                        "before dmuon.Muon."
                    )
        self._verified = True


def _taken_at_once(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists that foreach operations are given: DTensors of one device mesh, and not too many.

    An operation refuses tensors of several meshes. In the first step on a list of DTensors it looks at the
    whole list once for each of them.
    """
    split: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        split.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    plain = split.pop(None, [])
    lists = [
        same[i : i + _FOREACH_SIZE] for same in split.values() for i in range(0, len(same), _FOREACH_SIZE)
    ]
    return [*lists, plain] if plain else lists
