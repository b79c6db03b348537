"""One model's engine: hooks that put gathers, reductions and publishes into the queues.

The rule that keeps all ranks together: work is put at places of the *program* that all ranks come to, never
when something has arrived or is over.

- A group is gathered when its forward or backward begins, or when that of the group before it does (prefetch,
  in the order of the last forward).
- It is reduced when the backward of the next group begins that is not inside it, or at the end of the
  backward; with zeros for what this rank has no gradient for. If it ran several times, its last backward
  counts. Before its gradients are taken, the computation waits for the reduction before: so there are never
  more whole gradients than those of two groups, one on its way and one that the backward is at.
- It is published in front of its next gather.

As with FSDP2, all ranks run the same boundaries; what happens inside one may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable

from ..scratch import Scratch
from ..selection import enclosing
from . import fsdp
from .agreement import check_alike
from .boundaries import Presence, check_sharding, homes, hook_boundaries
from .buffer import Gradient, Precision, Updates
from .collectives import Communication, Parts, ProcessGroups, Traffic
from .ddp import Averaging
from .group import Group
from .hooks import tensors_in, untraced
from .layout import DataParallelLayout
from .parameter import DedicatedParam
from .queue import Ticket
from .stack import Stack

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_dmuon_runtime"
_PUBLISHED_AHEAD = 2  # groups whose updates a step sends at once
_RECOMPUTATION = -1  # in place of the number of a forward


@dataclasses.dataclass(frozen=True)
class Options:
    """What `dedicate_params` was asked for, as far as it matters after planning."""

    reshard_after_forward: bool | None  # None: as the enclosing FSDP2 module
    precision: Precision | None  # None: likewise
    hook_boundary: Callable[[str, nn.Module], bool] | None  # None: follow fully_shard, else the blocks
    process_groups: ProcessGroups
    master_dtype: torch.dtype | None = None  # of weights at rest; None: the model's
    reuse_gather: bool = False  # keep the buffers of exchanges towards the TP owners
    reuse_scatter: bool = False  # and of those back


class Runtime:
    """Hooks and groups of one model.

    Until it is *sealed* (by `Muon`, by the first forward or by whoever needs the groups first) only the
    resting parameters exist, and `fully_shard` can still wrap modules. Sealing reads where FSDP2's
    boundaries are, makes the groups and installs their hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: DataParallelLayout,
        params: list[DedicatedParam],
        options: Options,
        stacks: Sequence[Stack] = (),
    ) -> None:
        self.model = model
        self.layout = layout
        self.params = params  # in module order
        self.stacks = tuple(stacks)  # what Muon trains besides
        self.options = options
        self.groups: list[Group] = []  # in module order
        self.on_seal: list[Callable[[], None]] = []
        self.orthogonalization: str | None = None  # how the optimizer does it, in words
        self.no_sync_depth = 0  # how many `no_sync` are around
        self.communication: Communication | None = None
        self.averaging = Averaging(model, layout)
        self._presence = Presence(model, params)
        self._by_resting = {id(param.resting): param for param in params}
        self._enclosed_by: dict[Group, nn.Module | None] = {}  # the module of FSDP2 around it
        self._scheduled_by: dict[Group, nn.Module | None] = {}  # the same, of those that have parameters
        self._inside: dict[Group, set[Group]] = {}  # the groups whose modules contain its own
        self._next_group: dict[Group, Group] = {}  # as last seen in a forward
        self._group_before: dict[Group, Group] = {}  # the same, seen from behind
        self._first_group: Group | None = None
        self._last_group: Group | None = None  # of the forward under way
        self._forward = 0  # its number
        self._have_agreed = False
        self._ended: Callable[[], _EndOfBackward | None] = lambda: None
        self._unfinished = False  # a backward has begun and its end has not been reached
        self._open: list[Group] = []  # the running backward has come to them, and not reduced them yet
        self._reductions: list[Ticket[list[Gradient]]] = []  # of the running backward
        self._feeds = False  # the running backward gives gradients to weights
        self._fruitless = False  # one without reduction gave none
        model.__dict__[_ATTRIBUTE] = self
        for param in params:
            param.model, param.agree = weakref.ref(model), self.agree
        attributes: dict[nn.Module, set[str]] = {}
        for param in params:
            attributes.setdefault(param.module, set()).add(param.attribute)
        for module, names in attributes.items():
            fsdp.hide_from_fully_shard(module, names, model)
        model.register_forward_pre_hook(self._enter)

    def __deepcopy__(self, memo: object) -> Runtime:
        raise TypeError(
            "a model with dedicated parameters cannot be copied: copy it before dedicate_params, or build "
            "another one and load this one's state_dict"
        )

    def __reduce__(self) -> tuple:
        raise TypeError("a model with dedicated parameters cannot be pickled; save its state_dict instead")

    def record_of(self, tensor: torch.Tensor) -> DedicatedParam | None:
        """The dedicated parameter whose resting parameter `tensor` is, if any."""
        return self._by_resting.get(id(tensor))

    @property
    def traffic(self) -> Traffic:
        """What this model has moved so far."""
        return self.communication.traffic if self.communication is not None else Traffic()

    # Sealing

    @property
    def is_sealed(self) -> bool:
        """Whether the groups exist."""
        return bool(self.groups)

    def seal(self) -> None:
        """Make the groups and install their hooks; collective over all ranks of the model, once."""
        if self.is_sealed:
            return
        for module in {param.module for param in self.params}:
            fsdp.unhide(module)
        self.check()
        self.agree()
        cuts = list({id(param.tp): param.tp for param in self.params if param.tp is not None}.values())
        self.communication = Communication(self.layout, cuts, self.options.process_groups)
        boundaries = hook_boundaries(self.model, self.options.hook_boundary)
        members: dict[str, list[DedicatedParam]] = {name: [] for name in boundaries}
        home = homes(self.model, boundaries)
        for param in self.params:
            members[home[param.module]].append(param)
        sharded = fsdp.sharded_modules(self.model)
        scheduled = {name: module for name, module in sharded.items() if fsdp.has_parameters(module)}
        scratch = Scratch(self.options.reuse_gather), Scratch(self.options.reuse_scatter)
        by_module: dict[nn.Module, Group] = {}
        for name, params in members.items():
            if params:
                group = self._add_group(name, boundaries[name], params, sharded, scratch)
                by_module[group.module] = group
                self._enclosed_by[group] = _enclosing(name, sharded)
                self._scheduled_by[group] = _enclosing(name, scheduled)
        for outer in self.groups:
            for module in outer.module.modules():
                if module in by_module:
                    self._inside.setdefault(by_module[module], set()).add(outer)
        for param in self.params:
            param.settle, param.reduce_due = self.synchronize, self.reduce_due
            param.has_plain_neighbours = self.layout.is_ddp and not sharded
        fsdp.call_when_reduced(self.model, self._base_reduced)
        # Where a group's own outputs cannot be hooked, the model's begin the backward.
        self.model.register_forward_hook(
            untraced(lambda module, args, kwargs, out: self._root_post_forward((args, kwargs), out)),
            with_kwargs=True,
        )
        # Before FSDP2's own hooks, which go by what a backward that raised has left.
        self.model.register_forward_pre_hook(untraced(lambda module, args: self._recover()), prepend=True)
        self._first_group = self.groups[0]
        self._next_group = dict(zip(self.groups, self.groups[1:], strict=False))
        self._group_before = dict(zip(self.groups[1:], self.groups, strict=False))
        for task in self.on_seal:
            task()
        logger.debug("sealed: %s", self.groups)

    def agree(self) -> None:
        """Make sure that all ranks have chosen alike; collective over all of them, once.

        Raises:
            RuntimeError: as `check_alike`.
        """
        if self._have_agreed:
            return
        check_alike(self.model, self.params, self.stacks)
        self._have_agreed = True

    def check(self) -> None:
        """Refuse what `fully_shard`, or others, have made unworkable since `dedicate_params`.

        Raises:
            RuntimeError: for a dedicated parameter that another one has replaced.
            ValueError: if `fully_shard` averages gradients over other ranks, or offloads to the CPU.
        """
        self._presence.check(may_be_removed=False)
        for param in self.params:
            param.refresh()
        check_sharding(self.model, self.layout, self.params)
        for stack in self.stacks:
            stack.check()

    def _add_group(
        self,
        name: str,
        module: nn.Module,
        params: list[DedicatedParam],
        sharded: dict[str, nn.Module],
        scratch: tuple[Scratch, Scratch],
    ) -> Group:
        assert self.communication is not None
        precision, around = self.options.precision, _enclosing(name, sharded)
        if precision is None:
            policy = fsdp.mixed_precision(around) if around is not None else None
            precision = Precision(policy.param_dtype, policy.reduce_dtype) if policy else Precision()
        group = Group(name, module, params, self.communication, precision, scratch)
        module.register_forward_pre_hook(untraced(lambda module, args: self._pre_forward(group)))
        # always_call: a forward that raises must leave the module as it was.
        module.register_forward_hook(
            untraced(lambda module, args, kwargs, out: self._post_forward(group, (args, kwargs), out)),
            always_call=True,
            with_kwargs=True,
        )
        self.groups.append(group)
        return group

    # Forward

    def _enter(self, module: nn.Module, args: Any) -> None:
        # A method of ours, and made untraced at the call: so pickling the model comes to `__reduce__`.
        untraced(self._root_pre_forward)(module, args)

    def _root_pre_forward(self, module: nn.Module, args: Any) -> None:
        was_sealed = self.is_sealed
        self.seal()
        if self._in_backward:
            return
        if torch.is_grad_enabled():
            self._presence.check(may_be_removed=True)
        else:
            self._presence.check_places()
        for param in self.params:
            param.check_written()
        if torch.is_grad_enabled():
            self.averaging.check_forward()
        self._end_of_order()
        self._forward += 1
        if not was_sealed and self.groups[0].module is module:
            self._pre_forward(self.groups[0])  # its own hook came too late for this call

    def _pre_forward(self, group: Group) -> None:
        group.depth += 1
        in_backward = self._in_backward  # a recomputation: it says nothing about the order of the forward
        if not in_backward:
            self._recover()
        group.gather()
        if not in_backward:
            if self._last_group is not None:
                self._next_group[self._last_group] = group
                self._group_before[group] = self._last_group
            else:
                self._first_group = group
            self._last_group = group
            if (upcoming := self._next_group.get(group)) is not None:
                upcoming.gather()
        group.wait()
        group.show_gathered()

    def _post_forward(self, group: Group, inputs: Any, output: Any) -> None:
        group.depth = max(0, group.depth - 1)
        if group.depth:
            return  # a module that calls itself
        in_backward = self._in_backward
        outputs = list(tensors_in(output)) if torch.is_grad_enabled() or not in_backward else []
        hooked = _to_hook(inputs, outputs)
        if hooked:
            use = _Use(self, group, _RECOMPUTATION if in_backward else self._forward)
            for tensor in hooked:
                tensor.register_hook(use)
        if in_backward:
            return  # the weights are about to be used
        group.show_resting()
        leaks = any(group.holds(tensor) for tensor in outputs)  # a module that returns its own weight
        if not torch.is_grad_enabled():
            # FSDP2 would keep weights that are not resharded after forward. We let go: whatever changes them
            # before the next forward, by whatever means, is seen by it.
            if not (group.ran or leaks):
                group.release()
            return
        group.uses[self._forward] += bool(hooked)
        if hooked or group.is_trainable:
            group.ran = True
        # Without an output to hook, nothing would bring the weights back: they stay.
        brought_back = bool(hooked) or not group.ran
        if brought_back and not leaks and (self._reshards(group) or not group.ran):
            group.release()

    def _root_post_forward(self, inputs: Any, output: Any) -> None:
        for tensor in _to_hook(inputs, list(tensors_in(output))) if not self._in_backward else ():
            tensor.register_hook(lambda _: self._begin_backward())

    def _reshards(self, group: Group) -> bool:
        """Whether the weights are freed between forward and backward."""
        if self.options.reshard_after_forward is not None:
            return self.options.reshard_after_forward
        return fsdp.reshards_after_forward(self._enclosed_by[group], self.model)

    def _end_of_order(self) -> None:
        """The last group of a forward has none to prefetch."""
        if self._last_group is not None:
            self._next_group.pop(self._last_group, None)
            self._last_group = None

    # Backward

    @property
    def _in_backward(self) -> bool:
        """Whether a backward in which our groups take part is running.

        The engine keeps the end-of-backward callback alive exactly as long as that backward: a flag would
        still be up after a backward that raised.
        """
        # The engine's threads may hold the callback a moment longer; then no task of theirs is ours.
        return self._ended() is not None and torch._C._current_graph_task_id() != -1

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._recover()
        callback = _EndOfBackward(self)
        self._ended = weakref.ref(callback, self._backward_is_over)
        self._unfinished = True
        for group in self.groups:
            group.schedule = self._schedule(group)
        Variable._execution_engine.queue_callback(callback)

    def _schedule(self, group: Group) -> fsdp.Schedule:
        """What FSDP2's switches and `no_sync` ask for now."""
        schedule = fsdp.schedule(self._scheduled_by[group])
        return dataclasses.replace(schedule, reduce=False) if self.no_sync_depth else schedule

    def _boundary_begins(self, group: Group) -> None:
        """The backward has come to an output of the group's module."""
        # A group around this one has more of its backward to come, and so has one that ran again.
        over = [g for g in self._open if g is not group and g.is_done and g not in self._inside[group]]
        for earlier in over:
            # Only now: a backward may use a weight without giving it a gradient (`weight.detach()`).
            earlier.retire()
        if group not in self._open:
            self._open.append(group)
        group.ran = True
        if not group.schedule.reduce:
            self._feeds = self._feeds or fsdp.accumulates_into(p.gathered for p in group.params)
        group.gather()
        previous = self._group_before.get(group)
        waits = previous is not None and previous.ran and not previous.reached and previous not in self._open
        if previous is not None and waits and self._next_group.get(previous) is group:
            previous.gather()
        for earlier in over:
            self._send(earlier)
        group.wait()
        group.show_gathered()  # for what is recomputed inside the module

    def _check_second_backward(self, group: Group) -> None:
        """Refuse a backward of which there is a graph (`create_graph=True`), where that could not be right.

        Raises:
            RuntimeError: by a parameter's name, on every rank.
        """
        has_base = self._scheduled_by[group] is not None  # FSDP2 frees those on rows of one, too
        if group.schedule.reshard and (group.frees_weights or has_base):
            raise RuntimeError(
                f"create_graph=True: a second backward would read {group.params[0].param_name}, or what is "
                "beside it, after it has been freed. Call set_reshard_after_backward(False) on the FSDP2 "
                "model before, and reshard() on its modules after the last backward."
            )
        cut = next((param for param in group.params if param.is_cut), None)
        if cut is not None:
            raise RuntimeError(
                f"create_graph=True: {cut.param_name} is cut by tensor parallelism, whose second backward is "
                "not right in torch. Penalize gradients without tensor parallelism."
            )

    def _send(self, group: Group) -> None:
        """All of a group's backward has run: reduce its gradients, or keep them for a later reduction."""
        if group in self._open:
            self._open.remove(group)
        if not group.schedule.reduce:
            group.accumulate()
            return
        if self._reductions:  # so that no third group's gradients come to be
            self._reductions[-1].wait()
        self._reductions.append(group.reduce())

    def _finish_backward(self) -> None:
        """The engine has run all of a backward: reduce what is left, hand over the gradients."""
        others = [group for group in reversed(self.groups) if group.ran or group.is_due]
        for group in dict.fromkeys((*self._open, *others)):
            self._send(group)
        if not self._feeds and any(group.reached and not group.schedule.reduce for group in self.groups):
            self._fruitless = True
        self._hand_over()
        for group in self.groups:
            group.end_backward()
        self._reset()

    def _hand_over(self) -> None:
        """Add the averaged gradients to those of the resting parameters.

        At the end, not when they arrive: a backward that raises then leaves gradients as they were.
        """
        for ticket in self._reductions:
            for param, local, count in ticket.wait():
                param.add_gradient(local, count)
                # As FSDP2 does for its own; autograd does not know the resting parameter.
                for hook in (getattr(param.resting, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(param.resting)
        self._reductions.clear()

    def _backward_is_over(self, _: object) -> None:
        """Also after a backward that raised, whose modules would go on to show gathered parameters."""
        for group in self.groups:
            if not group.depth:
                group.show_resting()

    def _reset(self) -> None:
        self._open.clear()
        self._reductions.clear()
        self._unfinished = self._feeds = False
        self._ended = lambda: None
        self._end_of_order()

    def _recover(self) -> None:
        """Drop what a backward that raised has left behind."""
        if not self._unfinished or self._in_backward:
            return
        logger.warning(
            "the last backward did not finish; its gradients of dedicated parameters are dropped, and those "
            "that earlier ones have left unreduced. Call optimizer.zero_grad() to drop the others, too"
        )
        with contextlib.suppress(RuntimeError):
            for ticket in self._reductions:
                ticket.wait()
        for group in self.groups:
            group.abort()
        fsdp.forget_backward(self.model)
        self._reset()

    # Between backward and step

    def _base_reduced(self, _: torch.Tensor) -> None:
        """FSDP2 has reduced a gradient. Outside of a backward it is pipelining that asks for it, and scales
        all gradients next."""
        if torch._C._current_graph_task_id() == -1:
            self._reduce_due()

    def reduce_due(self) -> None:
        """Reduce what backwards without reduction have left, where FSDP2's switches ask for it by now.

        Of base parameters, too. On all ranks.
        """
        self._recover()
        if self._in_backward:
            return
        self._reduce_due()
        fsdp.reduce_due(self.model)

    def _reduce_due(self) -> None:
        """That of dedicated parameters: pipelining reduces the others by hand, outside of autograd."""
        for group in reversed(self.groups):
            if group.unreduced:
                group.schedule = self._schedule(group)
                if group.is_due:
                    self._send(group)
                    group.retire()
        self._hand_over()

    def check_reduced(self) -> None:
        """Refuse to go on where gradients would be ignored.

        Raises:
            RuntimeError: with the name of a parameter that has some.
        """
        waiting = (group.params[0].param_name for group in self.groups if group.unreduced)
        left = next(waiting, None) or fsdp.unreduced(self.model)
        if left is not None:
            raise RuntimeError(
                f"{left} has gradients that are not reduced: the backwards since the last step ran under "
                "dmuon.no_sync, or with FSDP2's set_requires_gradient_sync(False) or "
                "set_requires_all_reduce(False), which still holds. Let the last backward before a step "
                "communicate; optimizer.zero_grad() drops the gradients."
            )
        hidden = next((group for group in self.groups if group.holds_gradients), None)
        if hidden is not None:
            raise RuntimeError(
                f"{hidden.params[0].param_name} has gradients of a backward that went unnoticed: neither in "
                f"what {hidden.name} nor in what the model returned was a tensor to be found. Return tensors "
                "or objects that hold some; optimizer.zero_grad() drops the gradients."
            )
        if self._fruitless and all(param.resting.grad is None for param in self.params):
            raise RuntimeError(
                f"the backward has come to {self.params[0].param_name} and given it no gradient: it was "
                "called for the gradients of other tensors alone, as torch.autograd.grad is. Call backward "
                "for those of the weights before the step."
            )

    def drop_unreduced_gradients(self) -> None:
        """Forget what backwards without reduction, or without an end, have left; of base parameters, too."""
        self._recover()
        self._fruitless = False
        fsdp.drop_unreduced_gradients(self.model)
        if any(group.unreduced or group.holds_gradients for group in self.groups):
            for group in self.groups:
                group.drop_unreduced()

    # After the step

    def form_teams(self, chosen: Collection[DedicatedParam]) -> None:
        """Decide which parameters have a team, before the first step.

        Raises:
            RuntimeError: where gradients lie, or are about to, as was decided before.
        """
        for group in self.groups:
            for param in group.params:
                has_team = param in chosen
                if has_team != param.has_team and group.ran:
                    raise RuntimeError(f"{group.name} has run and waits for its backward: build Muon before")
                if has_team != param.has_team and (group.unreduced or param.resting.grad is not None):
                    raise RuntimeError(
                        f"{param.param_name} has a gradient already, and tp_distributed_gram decides where "
                        "gradients lie: build Muon before the first backward, or call model.zero_grad() first"
                    )
                param.has_team = has_team

    def prepare_step(self) -> None:
        """What a step needs: all gradients, and replicas that are equal. On all ranks.

        Raises:
            RuntimeError: where it would ignore gradients, or a module has been replaced.
        """
        self._presence.check(may_be_removed=True)
        for param in self.params:
            param.check_written()
        self.reduce_due()
        self.check_reduced()
        for group in self.groups:
            if group.due or any(param.resting.grad is not None for param in group.params):
                group.publish()
            group.wait()

    def publish(self, updates: Updates) -> None:
        """Leave a step's updates with their groups, and send those that the next forward needs first.

        On all ranks, with the same parameters; all that was due before has been sent.
        """
        assert self.communication is not None
        self.communication.publishes = self.communication.publishes or bool(updates)
        for group in self.groups:
            group.uses.clear()  # graphs of before are of other weights
            group.leave(updates)
        if self.layout.shard_size == 1:  # no gather could be kept waiting by them
            ahead: Sequence[Group] = self.groups
        else:
            ahead, upcoming = [], self._first_group
            while upcoming is not None and len(ahead) < _PUBLISHED_AHEAD and upcoming not in ahead:
                ahead.append(upcoming)
                upcoming = self._next_group.get(upcoming)
        # What teams compute is work of the step. Inside a layer it would, besides, be in the sight of what
        # watches its operations, such as selective activation checkpointing.
        teams = [group for group in self.groups if any(param.has_team for param in group.due)]
        for group in (*ahead, *teams):
            if group.due:
                group.publish()

    def share(self, name: str, parts: Parts, apply: Callable[[], None]) -> Ticket[None]:
        """Put into the weights queue: to each replica what the others have made of a stack, then `apply`."""
        communication = self.communication
        assert communication is not None

        def run() -> None:
            communication.broadcast("publish", name, self.layout.column, parts)
            apply()

        return communication.weights.put("publish", name, run)

    def synchronize(self) -> None:
        """Publish all that is due, on all ranks, and wait for it."""
        assert self.communication is not None
        if not self.communication.publishes:  # asked for each weight of a state dict
            return
        for group in self.groups:
            if group.due:
                group.publish()
        for group in self.groups:
            group.wait()
        self.communication.publishes = False


class _Use:
    """The hook on the outputs of one call of a boundary's forward: its backward begins."""

    def __init__(self, runtime: Runtime, group: Group, forward: int) -> None:
        self._runtime = runtime
        self._group = group
        self._forward = forward
        self._version = group.version
        self._seen = -1  # the backward that has been here

    def __call__(self, _: torch.Tensor) -> None:
        runtime, group = self._runtime, self._group
        runtime._begin_backward()
        if group.version != self._version:
            raise RuntimeError(
                f"the dedicated weights of {group.name} have changed between its forward and its "
                "backward (an optimizer step, a load, or an in-place operation): the gradient would be "
                "that of neither. Run backward before changing them."
            )
        if torch.is_grad_enabled():
            runtime._check_second_backward(group)
        task = torch._C._current_graph_task_id()
        if self._seen != task:
            self._seen = task
            group.reached[self._forward] += 1
            runtime._boundary_begins(group)


def _to_hook(inputs: Any, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose gradient tells that the backward of a module begins.

    No leaves, where a hook would stay for ever; no inputs, whose gradient comes when all is over.
    """
    if not torch.is_grad_enabled():
        return []
    passed = {id(tensor) for tensor in tensors_in(inputs)}
    return [t for t in outputs if t.requires_grad and not t.is_leaf and id(t) not in passed]


class _EndOfBackward:
    """Called by autograd at the end of a backward; lives as long as the backward does."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self) -> None:
        self._runtime._finish_backward()


def _enclosing(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The innermost of `modules`, by name, that contains the module `name`, or is it."""
    around = enclosing(name, modules)
    return modules[around] if around is not None else None


def find_runtime(model: nn.Module) -> Runtime:
    """The runtime of a model, or of the model inside a wrapper.

    Raises:
        TypeError: for what is no module.
        ValueError: if no module in it has been through `dedicate_params`, or several have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model itself is wanted, a torch.nn.Module, not a {type(model).__name__}")
    found = [m.__dict__[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in m.__dict__]
    if not found:
        raise ValueError(
            "the model has no dedicated parameters; call dmuon.dedicate_params(model, mesh) first"
        )
    if len(found) > 1:
        raise ValueError(
            "several parts of the model were given to dedicate_params; give it the whole model once"
        )
    return found[0]


def has_runtime(model: nn.Module) -> bool:
    """Whether any module in `model` has been through `dedicate_params`."""
    return any(_ATTRIBUTE in module.__dict__ for module in model.modules())
