"""One model's engine: which group runs when, and what is in flight.

The rules that keep all ranks together:

- Gathers are issued in the order in which the model runs its groups, and prefetches in the order it ran them
  last time. As in FSDP2, what one rank gathers, all must gather.
- Reductions are issued in one order that does not depend on what a rank happened to see: the reverse of the
  module order. A group that is not complete holds back those behind it; the end of backward flushes the
  rest, with zeros where a rank has no gradient. (An order agreed on from the first forward would start some
  reductions earlier in models that register their modules in another order than they run them; it would cost
  a collective and a state, and gains nothing for the models that do not.)
- Each process group is used for one purpose, see `comm`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable

from . import base
from .boundaries import check_present, check_sharding, homes, hook_boundaries
from .bucket import HandOver, Precision, Update
from .channels import Channels, ProcessGroups
from .comm import Traffic
from .group import DedicatedGroup, Residency
from .hooks import tensors_in, untraced
from .layout import DataParallelLayout
from .parameter import DedicatedParam
from .pipeline import Pipeline
from .replicate import Replicas

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_dmuon_runtime"


@dataclasses.dataclass(frozen=True)
class Options:
    """What `dedicate_params` was asked for, as far as it matters after planning."""

    residency: Residency
    precision: Precision | None  # None: follow the enclosing FSDP2 module
    hook_boundary: Callable[[str, nn.Module], bool] | None  # None: follow fully_shard, else the blocks
    process_groups: ProcessGroups
    master_dtype: torch.dtype | None = None  # of weights at rest; None: the model's
    reuse_gather: bool = False  # keep the buffers of exchanges towards the TP owners
    reuse_scatter: bool = False  # and of those back


class Runtime:
    """Hooks, groups and what is in flight, for one model.

    Until it is *sealed* (by `Muon`, by the first forward or by whoever needs the groups first) only the
    resting parameters exist, and `fully_shard` can still wrap modules. Sealing reads where FSDP2's
    boundaries are, makes the groups and installs their hooks.
    """

    def __init__(
        self, model: nn.Module, layout: DataParallelLayout, params: list[DedicatedParam], options: Options
    ) -> None:
        self.model = model
        self.layout = layout
        self.params = params  # in module order
        self.options = options
        self.groups: list[DedicatedGroup] = []  # in module order
        self.replicas: Replicas | None = None  # the base parameters, where `replicate` is to care for them
        self.orthogonalization: str | None = None  # how the optimizer does it, in words
        self.traffic = Traffic()
        self._by_resting = {id(param.resting): param for param in params}
        self._scheduled_by: dict[DedicatedGroup, nn.Module | None] = {}  # the module of FSDP2 that it follows
        self._next_group: dict[DedicatedGroup, DedicatedGroup] = {}  # as last seen in a forward
        self._group_before: dict[DedicatedGroup, DedicatedGroup] = {}  # the same, seen from behind
        self._last_group: DedicatedGroup | None = None  # of the forward under way
        self._ended: Callable[[], _EndOfBackward | None] = lambda: None
        self.no_sync_depth = 0  # how many `no_sync` are around
        self._unfinished = False  # a backward has begun and its end has not been reached
        self._graph_task = -1  # autograd's number of the running backward
        self._recomputes = False  # gradients have come from a backward inside it (reentrant recomputation)
        self._reductions: Pipeline[HandOver] = Pipeline()
        self._in_turn: list[DedicatedGroup] = []  # those that the running backward reduces, in order
        self._next_to_reduce = 0
        self._channels: Channels | None = None
        self._complete: list[DedicatedGroup] = []  # have all their gradients, still hold their weights
        model.__dict__[_ATTRIBUTE] = self
        attributes: dict[nn.Module, set[str]] = {}
        for param in params:
            attributes.setdefault(param.module, set()).add(param.attribute)
        for module, names in attributes.items():
            base.hide_from_fully_shard(module, names)
        model.register_forward_pre_hook(self._enter)
        if layout.replicated:
            model.register_forward_hook(untraced(self._root_post_forward))

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

    # Sealing

    @property
    def is_sealed(self) -> bool:
        """Whether the groups exist."""
        return bool(self.groups)

    def seal(self) -> None:
        """Make the groups and install their hooks; collective over the data-parallel ranks, once."""
        if self.is_sealed:
            return
        for module in {param.module for param in self.params}:
            base.unhide(module)
        self.check()
        boundaries = hook_boundaries(self.model, self.options.hook_boundary)
        members: dict[str, list[DedicatedParam]] = {name: [] for name in boundaries}
        home = homes(self.model, boundaries)
        for param in self.params:
            members[home[param.module]].append(param)
        channels = Channels(
            self.layout,
            self.params,
            self.options.process_groups,
            replicates_base=self.replicas is not None,
            reuse_gather=self.options.reuse_gather,
            reuse_scatter=self.options.reuse_scatter,
        )
        self._channels = channels
        self.traffic = channels.traffic
        self._reductions = Pipeline(channels.side)
        sharded = base.sharded_modules(self.model)
        scheduled = {name: module for name, module in sharded.items() if base.has_parameters(module)}
        for name, params in members.items():
            if params:
                group = self._add_group(name, boundaries[name], params, channels, sharded)
                around = base.enclosing(name, scheduled)
                self._scheduled_by[group] = scheduled[around] if around is not None else None
        # Before FSDP2's own hooks, which go by what a backward that raised has left.
        self.model.register_forward_pre_hook(untraced(lambda module, args: self._recover()), prepend=True)
        self._next_group = dict(zip(self.groups, self.groups[1:], strict=False))
        self._group_before = dict(zip(self.groups[1:], self.groups, strict=False))
        if self.replicas is not None:
            assert channels.base is not None
            self.replicas.start(channels.base, self._advance_reductions)
        logger.debug("sealed: %s", self.groups)

    def check(self) -> None:
        """Refuse what `fully_shard`, or others, have made unworkable since `dedicate_params`.

        Raises:
            RuntimeError: for a dedicated parameter that another one has replaced.
            ValueError: if `fully_shard` averages gradients over other ranks, offloads to the CPU, or is used
                together with DDP.
        """
        check_present(self.model, self.params, may_be_removed=False)
        for param in self.params:
            param.refresh()
        check_sharding(self.model, self.layout, self.params)

    def _add_group(
        self,
        name: str,
        module: nn.Module,
        params: list[DedicatedParam],
        channels: Channels,
        sharded: dict[str, nn.Module],
    ) -> DedicatedGroup:
        precision = self.options.precision
        if precision is None:
            around = base.enclosing(name, sharded)
            policy = base.mixed_precision(sharded[around]) if around is not None else None
            precision = Precision(policy.param_dtype, policy.reduce_dtype) if policy else Precision()
        group = DedicatedGroup(name, module, params, channels, self.options.residency, precision)
        group.on_gradient(lambda: self._gradient_arrived(group))
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
        self._end_of_order()
        if self._channels is not None and self._channels.has_gram_stage:
            # These publishes compute. Inside a layer, that would be in the sight of whatever watches its
            # operations, such as selective activation checkpointing.
            self.wait_published()
        if self.layout.replicated:
            self._update_replicas()
        if not was_sealed and self.groups[0].module is module:
            self._pre_forward(self.groups[0])  # its own hook came too late for this call

    def _update_replicas(self) -> None:
        """Under DDP: all that has changed is sent now. The modules to come may differ between ranks."""
        self._recover()
        if self.replicas is not None:
            self.replicas.synchronize()
        for group in self.groups:
            group.send()
        for group in self.groups:
            group.gather()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Under DDP: a backward through the model is seen on every rank, whatever it ran."""
        if self._in_backward or not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: self._begin_backward())

    def _pre_forward(self, group: DedicatedGroup) -> None:
        group.depth += 1
        if not self._in_backward:
            self._recover()
        group.gather()
        group.wait_gathered()
        if not self._in_backward:  # a recomputation says nothing about the order of the forward
            if self._last_group is not None:
                self._next_group[self._last_group] = group
                self._group_before[group] = self._last_group
            self._last_group = group
            if (upcoming := self._next_group.get(group)) is not None:
                upcoming.gather()
        group.show_gathered()

    def _post_forward(self, group: DedicatedGroup, inputs: Any, output: Any) -> None:
        group.depth = max(0, group.depth - 1)
        if group.depth:
            return  # a module that calls itself
        if self._in_backward:
            return  # a recomputation: the weights are about to be used
        group.show_resting()
        outputs = list(tensors_in(output))
        leaks = any(group.holds(tensor) for tensor in outputs)  # a module that returns its own weight
        if not torch.is_grad_enabled():
            # FSDP2 would keep weights that are not resharded after forward. We let go: whatever changes them
            # before the next forward, by whatever means, is seen by it.
            if not (group.ran or leaks):
                group.release()
            return
        # No leaves, where a hook would stay for ever; no inputs, whose gradient comes when all is over.
        passed = {id(tensor) for tensor in tensors_in(inputs)}
        hooked = [t for t in outputs if t.requires_grad and not t.is_leaf and id(t) not in passed]
        for tensor in hooked:
            tensor.register_hook(self._pre_backward_hook(group))
        if hooked or group.is_trainable:
            group.ran = True
        # Without an output to hook, nothing would bring the weights back: they stay.
        brought_back = bool(hooked) or not group.ran
        if brought_back and not leaks and (group.residency == "while_used" or not group.ran):
            group.release()

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

    def _pre_backward_hook(self, group: DedicatedGroup) -> Callable[[torch.Tensor], None]:
        version = group.version

        def pre_backward(_: torch.Tensor) -> None:
            self._begin_backward()
            if group.version != version:
                raise RuntimeError(
                    f"the dedicated weights of {group.name} have changed between its forward and its "
                    "backward (an optimizer step, a load, or an in-place operation): the gradient would be "
                    "that of neither. Run backward before changing them."
                )
            if torch.is_grad_enabled() and group.residency != "always" and group.schedule.reshard:
                raise RuntimeError(
                    f"create_graph=True: a second backward would read the weights of {group.name} after they "
                    "have been freed. Call set_reshard_after_backward(False) on the FSDP2 model before, "
                    "or use DDP."
                )
            first = not group.reached
            group.reached = group.ran = True
            group.gather()
            group.wait_gathered()
            group.show_gathered()  # for what is recomputed inside the module
            if first:
                self._release_complete()
                self._prefetch_backward(group)

        return pre_backward

    def _prefetch_backward(self, group: DedicatedGroup) -> None:
        previous = self._group_before.get(group)
        if previous is None or self._next_group.get(previous) is not group:
            return
        if previous.ran and not previous.reached:
            previous.gather()

    def _release_complete(self) -> None:
        """Free the weights of groups that have all their gradients.

        Not at once, but when the next group's backward begins: by then, all of the group's backward has run,
        also what uses a weight without giving it a gradient (`weight.detach()`).
        """
        for group in self._complete:
            group.retire()
        self._complete.clear()

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._recover()
        callback = _EndOfBackward(self)
        self._ended = weakref.ref(callback, self._backward_is_over)
        self._unfinished = True
        self._graph_task = torch._C._current_graph_task_id()
        # Who takes part is fixed now: what a recomputation adds may come at different times on the ranks.
        # Under DDP all do: without gathers, nothing says that the other ranks have run the same groups.
        for group in self.groups:
            group.ran = group.ran or (self.layout.replicated and bool(group.buckets))
            schedule = base.schedule(self._scheduled_by[group])
            group.schedule = dataclasses.replace(schedule, reduce=schedule.reduce and not self.no_sync_depth)
        self._in_turn = [group for group in reversed(self.groups) if group.takes_part]
        if self.replicas is not None:
            self.replicas.begin()
        Variable._execution_engine.queue_callback(callback)

    def _backward_is_over(self, _: object) -> None:
        """Also after a backward that raised, whose modules would go on to show gathered parameters."""
        for group in self.groups:
            if not group.depth:
                group.show_resting()
        if self.replicas is not None:
            self.replicas.restore()

    def _gradient_arrived(self, group: DedicatedGroup) -> None:
        self._begin_backward()
        if group.all_arrived:
            self._complete.append(group)
        self._advance_reductions()

    def _advance_reductions(self) -> None:
        """A gradient has arrived: start and take forward what can be."""
        self._begin_backward()
        # Whose gradients are complete when, and when a stage is over, differs between ranks. Process groups
        # shared with FSDP2 and with our gathers do not bear that, so there all waits for the end of backward.
        # So it does under DDP with reentrant recomputation, where a layer that was used twice gives gradients
        # twice: on this rank, perhaps on no other, so that a second reduction would find no partner.
        if self.layout.replicated and torch._C._current_graph_task_id() != self._graph_task:
            self._recomputes = True
        if self.options.process_groups == "isolated" and not self._recomputes:
            if self.replicas is not None and not self.no_sync_depth:
                self.replicas.reduce_complete()
            self._reduce_complete()
            self._reductions.poll()

    def _reduce_complete(self) -> None:
        """Start the reductions whose turn it is."""
        while self._next_to_reduce < len(self._in_turn):
            group = self._in_turn[self._next_to_reduce]
            if not group.all_arrived:
                return
            if not group.launched:
                group.reduce(self._reductions)
            self._next_to_reduce += 1

    def _finish_backward(self) -> None:
        """The engine has run all of a backward: reduce what is left, hand over the gradients."""
        in_turn = set(self._in_turn)
        late = [group for group in reversed(self.groups) if group not in in_turn]
        for group in (*self._in_turn, *late):
            if group.takes_part and (not group.launched or group.has_unreduced_gradient):
                group.reduce(self._reductions)
        if self.replicas is not None and self.no_sync_depth:
            self.replicas.end_without_reduction()
        elif self.replicas is not None:
            self.replicas.finish()
        for hand_over in self._reductions.finish():
            hand_over()
        for group in self.groups:
            group.end_backward()
        self._reset()

    def _reset(self) -> None:
        self._complete.clear()
        self._reductions.clear()
        self._next_to_reduce = 0
        self._unfinished = False
        self._recomputes = False
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
        # To the end, not just to the stage they are in: which one that is differs between ranks.
        with contextlib.suppress(RuntimeError):
            self._reductions.finish()
        for group in self.groups:
            group.abort()
        if self.replicas is not None:
            self.replicas.reset()
        base.forget_backward(self.model)
        self._reset()

    # After the step

    def drop_unreduced_gradients(self) -> None:
        """Forget what backwards without reduction, or without an end, have left; of base parameters, too."""
        self._recover()
        if any(group.unreduced for group in self.groups):
            base.drop_unreduced_gradients(self.model)
            for group in self.groups:
                group.drop_unreduced()

    def keep_in_pieces(self, chooses: Callable[[DedicatedParam, torch.dtype, torch.dtype], bool]) -> None:
        """Decide whose gradient and momentum stay in pieces, before the first step.

        chooses: of a parameter and the dtypes in which its gradient and its update would travel.
        """
        for group in self.groups:
            for param in group.params:
                in_pieces = chooses(param, group.precision.reduce_dtype(param), param.resting.dtype)
                if in_pieces != param.in_pieces and group.ran:
                    raise RuntimeError(f"{group.name} has run and waits for its backward: build Muon before")
                if in_pieces != param.in_pieces and (group.unreduced or param.resting.grad is not None):
                    raise RuntimeError(
                        f"{param.param_name} has a gradient already, and tp_distributed_gram decides where "
                        "gradients lie: build Muon before the first backward, or call model.zero_grad() first"
                    )
                param.in_pieces = in_pieces
        assert self._channels is not None
        self._channels.has_gram_stage = any(param.in_pieces for param in self.params)

    def publish(self, updates: Mapping[DedicatedParam, Update]) -> None:
        """Start to bring updates to the pieces, and weights to those who keep a copy.

        On all ranks, with the same parameters.
        """
        self.wait_published()  # a channel belongs to one stage only within one step
        for group in self.groups:
            group.publish(updates)

    def wait_published(self) -> None:
        """Wait until no publish is in flight."""
        for group in self.groups:
            group.wait_published()


class _EndOfBackward:
    """Called by autograd at the end of a backward; lives as long as the backward does."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self) -> None:
        self._runtime._finish_backward()


def find_runtime(model: nn.Module) -> Runtime:
    """The runtime of a model, or of the model inside a wrapper.

    Raises:
        TypeError: for what is no module.
        ValueError: if no module in it has been through `dedicate_params`, or several have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model itself is wanted, a torch.nn.Module, not a {type(model).__name__}; parameters with "
            "settings of their own go into param_groups"
        )
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
