"""The dedicated parameters of one hook boundary: gathered, freed and reduced together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn as nn

from .base import Schedule
from .bucket import Bucket, HandOver, Precision, Update
from .channels import Channels
from .parameter import DedicatedParam, Version
from .pipeline import Pipeline

Residency = Literal["until_backward_done", "while_used", "always"]


class DedicatedGroup:
    """The parameters of one hook boundary, as buckets; the only state machine of the engine.

    Attributes:
        ran: the group takes part in the next reduction: it has run in a forward with gradients, or has been
            reached by a backward, since the last one.
        reached: the running backward has come to one of its outputs.
        launched: its reduction has started, in the running backward.
        unreduced: it has gradients of earlier backwards that were not, or not fully, reduced.
        schedule: what the running backward is to do with gradients and weights.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        channels: Channels,
        residency: Residency,
        precision: Precision,
    ) -> None:
        self.name = name or "the root module"
        self.module = module
        self.params = tuple(params)
        self.residency: Residency = residency
        self.precision = precision
        self._channels = channels
        self.buckets: list[Bucket] = []
        self.depth = 0  # how many calls of the module's forward are under way
        self.ran = False
        self.launched = False
        self.reached = False
        self.unreduced = False
        self.schedule = Schedule()
        self._arrived = 0
        self._expected: int | None = None  # how many are to arrive; None: not counted in this backward
        self._on_gradient: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"DedicatedGroup({self.name}, {len(self.params)} parameters, {len(self.buckets)} buckets)"

    @property
    def version(self) -> tuple[Version, ...]:
        """The versions of all its weights."""
        return tuple(param.version for param in self.params)

    # Weights

    def gather(self) -> None:
        """Start to bring the full weights to every rank."""
        self._build_buckets()
        for bucket in self.buckets:
            bucket.gather()

    def wait_gathered(self) -> None:
        """Wait until the full weights are here."""
        for bucket in self.buckets:
            bucket.wait_gathered()

    def release(self) -> None:
        """Free the full weights, unless they are to stay."""
        if self.residency != "always":
            for bucket in self.buckets:
                bucket.release()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the group's gathered weights, and must not outlive them."""
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)  # wrappers have no storage to ask for
        return is_plain and any(bucket.holds(tensor) for bucket in self.buckets)

    def send(self) -> None:
        """Issue all that a publish in flight still has to issue."""
        for bucket in self.buckets:
            bucket.send()

    def wait_published(self) -> None:
        """Wait until no publish of these weights is in flight."""
        for bucket in self.buckets:
            bucket.wait_published()

    def publish(self, updates: Mapping[DedicatedParam, Update]) -> None:
        """Start to publish those parameters of the group that are updated."""
        self._build_buckets()
        for bucket in self.buckets:
            chosen = {param: updates[param] for param in bucket.params if param in updates}
            if chosen:
                bucket.publish(chosen)

    def show_gathered(self) -> None:
        """Put the gathered parameters on their modules."""
        for param in self.params:
            param.show_gathered()

    def show_resting(self) -> None:
        """Put the resting parameters on their modules."""
        for param in self.params:
            param.show_resting()

    def _build_buckets(self) -> None:
        """Pack the parameters into buckets; again after a change of dtype, or of what stays in pieces."""
        for param in self.params:
            param.refresh()
            if param.resting.is_meta:
                raise RuntimeError(
                    f"{param.param_name} is still on the meta device. Call model.to_empty(device=...) and "
                    "initialise the weights before the first forward."
                )
        if self.buckets and all(bucket.is_current for bucket in self.buckets):
            return
        if self.unreduced:
            raise RuntimeError(
                f"the weights of {self.name} were converted while gradients of earlier micro-batches are not "
                "reduced. Convert them before, or after the optimizer's step."
            )
        self.wait_gathered()  # no release: the master weights may lie in the buffers; these go by themselves
        by_key: dict[tuple, list[DedicatedParam]] = {}
        for param in self.params:
            slot = param.layout.slot_of(param.coordinate)
            cut_into = param.tp.ranks if param.tp is not None and param.is_cut else ()
            copies = param.tp.copies if param.tp is not None and len(param.tp.copies) > 1 else ()
            dtypes = f"{param.resting.dtype} {param.compute_dtype}"
            key = (slot, dtypes, cut_into, copies, param.in_pieces)
            by_key.setdefault(key, []).append(param)
        self.buckets = [
            Bucket(params, self._channels, self.precision, f"group {self.name!r}, owner slot {key[0]}")
            for key, params in sorted(by_key.items(), key=lambda item: item[0])
        ]
        # Weakly: autograd keeps the hook where the garbage collector does not look for cycles.
        reference = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            group = reference()
            if group is not None:
                group._gradient_arrived()

        for param in self.params:
            assert param.gathered is not None
            param.gathered.register_post_accumulate_grad_hook(arrived)

    # Gradients

    def on_gradient(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a gradient of the group has arrived."""
        self._on_gradient = callback

    def _gradient_arrived(self) -> None:
        self.ran = True
        self._arrived += 1
        if self._on_gradient is not None:
            self._on_gradient()

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter of the group wants a gradient."""
        return any(param.resting.requires_grad for param in self.params)

    @property
    def all_arrived(self) -> bool:
        """Whether every trainable parameter of the group has its gradient, in the running backward."""
        if self._expected is None:
            self._expected = sum(param.resting.requires_grad for param in self.params)
        return self._arrived >= self._expected

    @property
    def has_unreduced_gradient(self) -> bool:
        """Whether a gradient came after the group's reduction had started (a module run again by
        recomputation within one backward)."""
        return any(p.gathered is not None and p.gathered.grad is not None for p in self.params)

    @property
    def takes_part(self) -> bool:
        """Whether the running backward is to reduce the group; the same on all ranks."""
        return self.schedule.reduce and (self.ran or self.unreduced)

    def reduce(self, reductions: Pipeline[HandOver]) -> None:
        """Start the reductions of the group, one per bucket."""
        self.launched = True
        for bucket in self.buckets:
            reductions.start(bucket.reduce(self.schedule))

    def end_backward(self) -> None:
        """Forget what belongs to one backward, and let go of the weights."""
        if self.schedule.reduce:
            self.unreduced = self.takes_part and not self.schedule.all_reduce
            self._drop_gathered_gradients()  # of a backward that raised, or of a parameter frozen since
        else:
            self.unreduced = self.unreduced or self.ran
        self.ran = self.reached = self.launched = False
        self._arrived = 0
        self._expected = None
        self.retire()

    def retire(self) -> None:
        """Free the weights, and put the resting parameters on the modules; not while a forward runs."""
        if not self.depth:
            self.show_resting()
            if self.schedule.reshard:
                self.release()

    def drop_unreduced(self) -> None:
        """Forget gradients that have not been reduced."""
        self.unreduced = False
        self._drop_gathered_gradients()
        for bucket in self.buckets:
            bucket.drop_unreduced()

    def _drop_gathered_gradients(self) -> None:
        for param in self.params:
            if param.gathered is not None:
                param.gathered.grad = None

    def abort(self) -> None:
        """Drop what an iteration that raised has left behind."""
        self.depth = 0
        self.end_backward()
        self.drop_unreduced()
