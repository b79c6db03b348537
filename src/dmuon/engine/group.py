"""The dedicated parameters of one hook boundary: gathered, freed, reduced and published together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from ..scratch import Scratch
from .buffer import Buffer, Gradient, Precision, Update, Updates
from .collectives import Communication
from .fsdp import Schedule
from .parameter import DedicatedParam, Version
from .queue import Ticket


class Group:
    """The parameters of one hook boundary, and where it stands in forward and backward.

    Attributes:
        ran: the group takes part in the next reduction: it has run in a forward with gradients, or has been
            reached by a backward, since the last one.
        uses: by forward of the model, how many calls with gradients a backward may still come to.
        reached: likewise, how many of them the running backward has come to.
        unreduced: it has gradients of earlier backwards that were not, or not fully, reduced.
        schedule: what the running backward is to do with gradients and weights.
        due: what the last step has left to be published.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        communication: Communication,
        precision: Precision,
        scratch: tuple[Scratch, Scratch],
    ) -> None:
        self.name = name or "the root module"
        self.label = f"group {self.name!r}"
        self.module = module
        self.params = tuple(params)
        self.precision = precision
        self.buffers: list[Buffer] = []
        self.depth = 0  # how many calls of the module's forward are under way
        self.ran = False
        self.uses: Counter[int] = Counter()
        self.reached: Counter[int] = Counter()
        self.unreduced = False
        self.schedule = Schedule()
        self.due: dict[DedicatedParam, Update] = {}
        self._communication = communication
        self._scratch = scratch
        self._dtypes = [param.resting.dtype for param in params]  # of the weights that the buffers are for
        self._filled: tuple[Version, ...] | None = None  # what the buffers hold; None: nothing
        self._published: tuple[Version, ...] | None = None  # what all replicas have; None: not known
        self._tickets: list[Ticket[Any]] = []  # of publishes and gathers: what the weights wait for

    def __repr__(self) -> str:
        return f"Group({self.name}, {len(self.params)} parameters)"

    @property
    def version(self) -> tuple[Version, ...]:
        """The versions of all its weights."""
        return tuple(param.version for param in self.params)

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the group wants a gradient."""
        return any(param.resting.requires_grad for param in self.params)

    @property
    def frees_weights(self) -> bool:
        """Whether `release` takes weights away from a backward that would still read them."""
        return any(not buffer.is_resting for buffer in self.buffers)

    # Weights

    def gather(self) -> None:
        """Put the way of the current weights to every rank into the queue, unless they are there."""
        versions = self._build()
        if self._filled == versions:
            return
        self.wait()
        self._publish(versions)
        for buffer in self.buffers:
            buffer.allocate()
        if self.frees_weights:
            self._put("gather", [buffer.gather for buffer in self.buffers if not buffer.is_resting])
        self._filled = versions

    def publish(self) -> None:
        """Put what is due to those who keep a copy into the queue: the update of the last step, and whole
        weights that something else has changed."""
        self._publish(self._build())

    def _publish(self, versions: tuple[Version, ...]) -> None:
        if self.due:
            due, self.due = self.due, {}
            self._put("publish", [partial(buffer.publish, due) for buffer in self.buffers])
        if self._published == versions:
            return
        stale = [param for param in self.params if param.published != param.version]
        if stale and stale[0].layout.replicate_size > 1:
            self._put("publish", [partial(buffer.equalize, stale) for buffer in self.buffers])
        for param in stale:
            param.published = param.version
        self._published = versions

    def leave(self, updates: Updates) -> None:
        """Take over what a step wants done to these weights, for `publish`."""
        assert not self.due, "an earlier step's updates have not been published"
        self.due = {param: updates[param] for param in self.params if param in updates}
        for param in self.due:
            param.published = param.version
        if len(self.due) == len(self.params):
            self._published = self.version

    def _put(self, phase: str, work: Sequence[Any]) -> None:
        def run() -> None:
            for each in work:
                each()

        if phase == "publish":
            self._communication.publishes = True
        self._tickets.append(self._communication.weights.put(phase, self.label, run))

    def wait(self) -> None:
        """Make the computation wait for what is in the queue; the weights may be read afterwards."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def release(self) -> None:
        """Free the full weights."""
        self.wait()
        if self.frees_weights:
            for buffer in self.buffers:
                buffer.free()
            self._filled = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the gathered weights, and must not outlive them."""
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)  # wrappers have no storage to ask for
        return is_plain and any(buffer.holds(tensor) for buffer in self.buffers)

    def show_gathered(self) -> None:
        """Put the gathered parameters on their modules."""
        for param in self.params:
            param.show_gathered()

    def show_resting(self) -> None:
        """Put the resting parameters on their modules."""
        for param in self.params:
            param.show_resting()

    def _build(self) -> tuple[Version, ...]:
        """Make the buffers; again after a change of dtype. Returns the versions of the weights."""
        is_current = bool(self.buffers)
        for param, dtype in zip(self.params, self._dtypes, strict=True):
            param.refresh()
            is_current = is_current and param.resting.dtype == dtype
        if is_current:
            return self.version
        for param in self.params:
            if param.resting.is_meta:
                raise RuntimeError(
                    f"{param.param_name} is still on the meta device. Call model.to_empty(device=...) and "
                    "initialise the weights before the first forward."
                )
        if self.unreduced:
            raise RuntimeError(
                f"the weights of {self.name} were converted while gradients of earlier micro-batches are not "
                "reduced. Convert them before, or after the optimizer's step."
            )
        self.wait()
        by_dtypes: dict[tuple[torch.dtype, ...], list[DedicatedParam]] = {}
        for param in self.params:
            by_dtypes.setdefault(self.precision.of(param), []).append(param)
        self.buffers = [
            Buffer(params, self._communication, self.precision, self.label, self._scratch)
            for _, params in sorted(by_dtypes.items(), key=lambda item: str(item[0]))
        ]
        self._dtypes = [param.resting.dtype for param in self.params]
        self._filled = None
        return self.version

    # Gradients

    @property
    def is_due(self) -> bool:
        """Whether what earlier backwards have left unreduced is to be reduced by now."""
        replicas_too = self.schedule.all_reduce or self.params[0].layout.replicate_size == 1
        return self.unreduced and self.schedule.reduce and replicas_too

    @property
    def holds_gradients(self) -> bool:
        """Whether this rank has gradients that are still where autograd has put them."""
        return any(param.gathered is not None and param.gathered.grad is not None for param in self.params)

    @property
    def is_done(self) -> bool:
        """Whether the running backward will not come to the group again, as far as its forward tells."""
        return all(count >= self.uses[forward] for forward, count in self.reached.items())

    def reduce(self) -> Ticket[list[Gradient]]:
        """Put the reduction of what this rank has into the queue; zeros for what it does not have."""
        taken = [buffer.take_gradients() for buffer in self.buffers]
        buffers, schedule = self.buffers, self.schedule
        self.unreduced = not schedule.all_reduce and self.params[0].layout.replicate_size > 1
        self.ran = False

        def run() -> list[Gradient]:
            return [
                g for buffer, mine in zip(buffers, taken, strict=True) for g in buffer.reduce(mine, schedule)
            ]

        return self._communication.gradients.put("reduce", self.label, run)

    def accumulate(self) -> None:
        """Keep this rank's gradients for a later reduction."""
        self.unreduced = self.unreduced or self.ran
        self.ran = False
        for buffer in self.buffers:
            buffer.accumulate()

    def retire(self) -> None:
        """Free the weights, and put the resting parameters on the modules; not while a forward runs."""
        if not self.depth:
            self.show_resting()
            if self.schedule.reshard:
                self.release()

    def end_backward(self) -> None:
        """Forget what belongs to one backward."""
        self.uses -= self.reached
        self.reached.clear()
        self.ran = False
        self.retire()

    def drop_unreduced(self) -> None:
        """Forget gradients that have not been reduced."""
        self.unreduced = False
        for buffer in self.buffers:
            buffer.drop_unreduced()

    def abort(self) -> None:
        """Drop what an iteration that raised has left behind."""
        self.depth = 0
        self.uses.clear()
        self.end_backward()
        self.drop_unreduced()
