"""Runs the descriptions of `loops` on the ranks, against a single process on the mean gradient.

The oracle is `reference.ReferenceMuon` on a plain copy of the model. Each rank computes the oracle's gradient
on its own batch, and a plain all-reduce makes the mean: that is the gradient of the mean loss. The oracle
keeps apart what is reduced (`grad`) and what is not yet, as FSDP2 does.

Of the base parameters, what FSDP2 does is taken as it is, with one word to it: after a forward that no
backward followed (or `set_reshard_after_backward(False)`), FSDP2 may keep gathered weights that a step does
not change. `rest` lets go of them, as torch's documentation asks for.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR

import dmuon
from layouts import make_mesh
from loop_model import INPUTS, OUTPUTS, Interrupted, distribute, is_proj, model_of
from loops import (
    Clip,
    Evaluate,
    Forward,
    Freeze,
    Load,
    Loop,
    Micro,
    Pair,
    Schedule,
    Sizes,
    Step,
    Use,
    Write,
    ZeroGrad,
    loop_of,
)
from models import assert_ranks_equal, full_weights
from rank_worker import forget_meshes
from reference import ReferenceMuon

BATCH, DECAY_OF_LR = 8, 0.7

# The two trainings


class Trained:
    """The model and the optimizer of dmuon on one layout."""

    def __init__(self, loop: Loop, sizes: Sizes, mesh: DeviceMesh, seed: int) -> None:
        self.sizes = sizes
        self.model = model_of(loop, seed)
        distribute(self.model, loop, sizes, mesh)
        self.optimizer = dmuon.Muon(
            self.model,
            lr=0.05,
            weight_decay=loop.weight_decay,
            nesterov=loop.nesterov,
            adjust_lr_fn=loop.adjust_lr_fn,
            adamw_lr=0.01,
            adamw_weight_decay=loop.weight_decay,
            replicate_async=loop.asynchronous,
            tp_distributed_gram=True,
            tp_distributed_gram_policy=loop.gram,
            ns_dtype=torch.float64 if loop.double else torch.float32,
            momentum_dtype=torch.float64 if loop.double else torch.float32,
        )
        self.scheduler = ExponentialLR(self.optimizer, DECAY_OF_LR)

    @property
    def data_rank(self) -> int:
        return dist.get_rank() // self.sizes.get("tp", 1)

    def rest(self) -> None:
        """Bring FSDP2's parameters back to their sharded form."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextlib.contextmanager
    def syncing(self, how: str) -> Iterator[None]:
        model = self.model
        if how in ("no_sync", "nested"):
            with dmuon.no_sync(model):
                if how == "nested":
                    with dmuon.no_sync(model):
                        pass
                yield
            return
        if how == "all_reduce":
            model.set_requires_all_reduce(False)
        elif how in ("gradient_sync", "keep"):
            model.set_requires_gradient_sync(False)
        if how == "keep":
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
        yield
        if how != "sync":
            model.set_requires_gradient_sync(True)  # and the all-reduce
        if how == "keep":
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)


class Oracle:
    """One process that sees the mean gradient."""

    def __init__(self, loop: Loop) -> None:
        self.model = model_of(loop, loop.seed)
        self.reference = ReferenceMuon(
            self.model,
            lambda name, p: is_proj(name, p) and p.requires_grad,
            lr=0.05,
            weight_decay=loop.weight_decay,
            nesterov=loop.nesterov,
            scale=loop.adjust_lr_fn,
            adamw_lr=0.01,
            adamw_weight_decay=loop.weight_decay,
        )
        self.named = dict(self.model.named_parameters())
        self.unreduced: dict[str, torch.Tensor] = {}

    def take_gradients(self, before: dict[str, torch.Tensor | None], reduced: bool) -> None:
        """Average what backwards have left in `.grad`, and put it where it belongs."""
        mine = {name: p.grad for name, p in self.named.items()}
        for name, p in self.named.items():
            p.grad = before[name]
        parts = [torch.zeros_like(p) if mine[n] is None else mine[n] for n, p in self.named.items()]
        counts = torch.tensor([grad is not None for grad in mine.values()]).to(parts[0].dtype)
        flat = torch.cat([*(part.reshape(-1) for part in parts), counts])
        dist.all_reduce(flat)
        sizes = [part.numel() for part in parts]
        *means, counts = flat.split([*sizes, len(counts)])
        for (name, p), mean, count in zip(self.named.items(), means, counts, strict=True):
            if count:
                mean = mean.view(p.shape) / dist.get_world_size()
                self.unreduced[name] = self.unreduced[name] + mean if name in self.unreduced else mean
        if reduced:
            for name, mean in self.unreduced.items():
                p = self.named[name]
                p.grad = mean.clone() if p.grad is None else p.grad + mean
            self.unreduced.clear()

    @contextlib.contextmanager
    def backwards(self, reduced: bool) -> Iterator[None]:
        before = {name: p.grad for name, p in self.named.items()}
        for p in self.named.values():
            p.grad = None
        yield
        self.take_gradients(before, reduced)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.unreduced.clear()
        for p in self.named.values():
            if p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p)

    def schedule(self) -> None:
        self.reference.lr *= DECAY_OF_LR
        if self.reference.adamw is not None:
            self.reference.adamw.param_groups[0]["lr"] *= DECAY_OF_LR


class Run:
    """One loop, on this rank."""

    def __init__(self, loop: Loop, meshes: dict[str, DeviceMesh]) -> None:
        self.loop = loop
        self.meshes = meshes
        self.number = 0  # of the action
        self.oracle = Oracle(loop)
        self.trained = Trained(loop, loop.sizes, self.mesh(loop.sizes), loop.seed)
        self.dtype = torch.float64 if loop.double else torch.float32
        self.weight_tolerance = 1e-8 if loop.double else 1e-5
        self.tolerance = 1e-9 if loop.double else 1e-5  # of gradients and momentum, relative

    def mesh(self, sizes: Sizes) -> DeviceMesh:
        key = str(sizes)
        if "tp" in sizes and next(reversed(self.meshes), key) != key:
            forget_meshes()  # the tensor-parallel dim of another mesh looks the same
        mesh = self.meshes.pop(key, None)
        self.meshes[key] = make_mesh(sizes) if mesh is None else mesh  # the last one is the one in use
        return self.meshes[key]

    def run(self) -> None:
        for number, action in enumerate(self.loop.actions):
            self.number = number
            if not isinstance(action, (Micro, Pair, Evaluate, Forward)):
                self.trained.rest()
            getattr(self, type(action).__name__.lower())(action)
        self.trained.rest()
        self.compare()

    # Forwards and backwards

    def batch(self, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        seed = 10000 * self.loop.seed + 100 * self.number + 10 * part + self.trained.data_rank
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH, INPUTS, generator=generator, dtype=self.dtype)
        return x, 3 * torch.randn(BATCH, OUTPUTS, generator=generator, dtype=self.dtype)

    def use(self, uses: tuple[Use, ...]) -> Use:
        return uses[self.trained.data_rank % len(uses)]

    def loss(self, model: nn.Module, micro: Micro, part: int = 0) -> torch.Tensor:
        x, y = self.batch(part)
        out = model(x, self.use(micro.uses), micro.recompute)
        return (out - y).square().mean()

    def both(self, micro: Micro, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        mine, expected = self.loss(self.trained.model, micro, part), self.loss(self.oracle.model, micro, part)
        self.check(mine, expected, "the loss")
        return mine, expected

    def micro(self, micro: Micro) -> None:
        sizes = self.trained.sizes
        has_replicas = sizes.get("replicate", 1) > 1 or sizes.get("ddp", 1) > 1
        reduced = micro.sync == "sync" or (micro.sync == "all_reduce" and not has_replicas)
        with self.trained.syncing(micro.sync), self.oracle.backwards(reduced):
            for loss in self.both(micro):
                loss.backward()
        self.compare_owned_gradients()  # also that nothing has come without sync

    def pair(self, pair: Pair) -> None:
        with self.oracle.backwards(True):
            firsts, seconds = self.both(pair.first), self.both(pair.second, part=1)
            for first, second in zip(firsts, seconds, strict=True):
                if pair.order == "sum":
                    (first + second).backward()
                    continue
                for loss in (first, second) if pair.order == "first" else (second, first):
                    loss.backward()
        self.compare_owned_gradients()

    def evaluate(self, action: Evaluate) -> None:
        x, _ = self.batch()
        with torch.inference_mode() if action.mode == "inference_mode" else torch.no_grad():
            mine, expected = (m(x, self.use(action.uses)) for m in (self.trained.model, self.oracle.model))
            self.check(mine, expected, "the output")
        if action.mode == "inference_mode":
            self.trained.rest()  # else FSDP2 would go on with tensors that autograd does not take

    def forward(self, action: Forward) -> None:
        x, _ = self.batch()
        with contextlib.suppress(Interrupted):
            self.trained.model(x, self.use(action.uses), fails=action.fails)

    # Everything else

    def clip(self, action: Clip) -> None:
        self.compare_gradients()
        mine = dmuon.clip_grad_norm_(self.trained.model, action.max_norm)
        expected = nn.utils.clip_grad_norm_(self.oracle.model.parameters(), action.max_norm)
        self.check(mine, expected, "the norm")

    def zerograd(self, action: ZeroGrad) -> None:
        self.trained.optimizer.zero_grad(action.set_to_none)
        self.oracle.zero_grad(action.set_to_none)

    def step(self, action: Step) -> None:
        if action.look:
            self.compare_gradients()
        self.trained.optimizer.step()
        self.oracle.reference.step()
        if action.look:
            self.compare()

    def freeze(self, action: Freeze) -> None:
        for model in (self.trained.model, self.oracle.model):
            for name in action.names:
                model.get_parameter(name).requires_grad_(action.requires_grad)

    def schedule(self, action: Schedule) -> None:
        self.trained.scheduler.step()
        self.oracle.schedule()

    @torch.no_grad()
    def write(self, action: Write) -> None:
        self.trained.optimizer.synchronize()
        for model in (self.trained.model, self.oracle.model):
            for name, param in model.named_parameters():
                if action.names is None or name in action.names:
                    param.mul_(action.factor)

    def load(self, action: Load) -> None:
        old = self.trained
        new = Trained(self.loop, action.sizes, self.mesh(action.sizes), self.loop.seed + 1)
        if action.warm:
            everywhere = Use(tuple(range(len(self.loop.hidden))))
            new.model(self.batch()[0], everywhere)
            new.rest()
        {"full": through_full_states, "dcp": through_files, "native": through_torchs_methods}[action.way](
            old, new
        )
        new.scheduler.load_state_dict(old.scheduler.state_dict())
        self.trained = new
        self.oracle.zero_grad()
        self.compare()

    # Comparing

    def check(self, mine: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        expected = expected.detach()
        bound = 10 * self.weight_tolerance * max(1.0, expected.abs().max().item())
        difference = (mine.detach() - expected).abs().max().item()
        assert difference <= bound, f"{what} is off by {difference}"

    def compare(self) -> None:
        """Weights and momentum."""
        weights = full_weights(self.trained.model)
        for name, expected in self.oracle.named.items():
            difference = (weights[name] - expected).abs().max().item()
            assert difference <= self.weight_tolerance, f"{name} is off by {difference}"
        assert_ranks_equal(weights)
        for record in dmuon.get_dedicated_params(self.trained.model):
            state = self.trained.optimizer.state.get(record.resting, {})
            if "momentum_buffer" in state and record.keeps_state:
                name = record.param_name
                expected = self.oracle.reference.buffers.get(self.oracle.named[name])
                self.compare_kept(record, state["momentum_buffer"], expected, "momentum")
            else:
                keeps = record.keeps_state and self.oracle.named[record.param_name]
                assert keeps is False or keeps not in self.oracle.reference.buffers, "momentum is missing"

    def compare_kept(self, record: Any, mine: DTensor, expected: torch.Tensor | None, what: str) -> None:
        """What the owner keeps; the whole or, of a team, its part."""
        local = mine._local_tensor
        expected = torch.zeros(record.full_shape) if expected is None else expected
        expected = expected[record.part] if record.has_team else expected
        bound = self.tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
        difference = (local - expected).abs().max().item() if local.numel() else 0.0
        assert difference <= bound, f"{what} of {record.param_name} is off by {difference}"

    def compare_gradients(self) -> None:
        """Which there are, on all ranks alike, and what they are."""
        named = dict(self.trained.model.named_parameters())
        flags = torch.tensor([float(p.grad is not None) for p in named.values()])
        least, most = flags.clone(), flags.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        differ = [n for n, a, b in zip(named, least, most, strict=True) if a != b]
        assert not differ, f"some ranks have a gradient, some have none, of {differ}"
        records = {record.param_name for record in dmuon.get_dedicated_params(self.trained.model)}
        for name, param in named.items():
            expected = self.oracle.named[name].grad
            if name in records:  # may have one that counts for nothing
                assert expected is None or param.grad is not None, f"{name} has no gradient"
                continue
            assert (param.grad is None) == (expected is None), f"{name} has a gradient: {expected is None}"
            if expected is not None:
                whole = dmuon.full_tensor(param.grad)
                bound = self.tolerance * max(1.0, expected.abs().max().item())
                difference = (whole - expected).abs().max().item()
                assert difference <= bound, f"gradient of {name} is off by {difference}"

    def compare_owned_gradients(self) -> None:
        """Those that this rank keeps; no collective."""
        for record in dmuon.get_dedicated_params(self.trained.model):
            if not record.keeps_state:
                continue
            name = record.param_name
            expected = self.oracle.named[name].grad
            count = record.gradient_count
            has_one = record.resting.grad is not None and (count is None or bool(count > 0))
            assert has_one == (expected is not None), f"{name} has one: {expected is None}"
            if record.resting.grad is not None:
                self.compare_kept(record, record.resting.grad, expected, "gradient")


# State dicts


def through_full_states(old: Trained, new: Trained) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(new.model, get_model_state_dict(old.model, options=options), options=options)
    state = get_optimizer_state_dict(old.model, old.optimizer, options=options)
    set_optimizer_state_dict(new.model, new.optimizer, state, options=options)


def through_files(old: Trained, new: Trained) -> None:
    paths = [tempfile.mkdtemp(prefix="loop-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    names = ("model", "optimizer")
    try:
        state = get_state_dict(old.model, old.optimizer)
        dcp.save(dict(zip(names, state, strict=True)), checkpoint_id=paths[0])
        state = dict(zip(names, get_state_dict(new.model, new.optimizer), strict=True))
        dcp.load(state, checkpoint_id=paths[0])
        set_state_dict(
            new.model, new.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        dist.barrier()
    finally:
        if paths[0] is not None and dist.get_rank() == 0:
            shutil.rmtree(paths[0], ignore_errors=True)


def through_torchs_methods(old: Trained, new: Trained) -> None:
    new.model.load_state_dict(old.model.state_dict())
    new.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))


# On the ranks


def run_loops(seeds: list[int]) -> int:
    """Run the loops of these seeds, which all have this world size. Returns how many actions they had."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # only of speed
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    meshes: dict[str, DeviceMesh] = {}
    actions = 0
    for loop in map(loop_of, seeds):
        run: Run | None = None
        try:
            run = Run(loop, meshes)
            run.run()
        except Exception as error:
            at = run.number if run is not None else "start"
            raise AssertionError(
                f"the loop of seed {loop.seed} fails at action {at}: {error}\n{loop}"
            ) from error
        actions += len(loop.actions)
    return actions
