"""All ranks put the same work into the queues, in one order, whatever each of them has to give."""

import contextlib
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.engine.buffer import Buffer
from dmuon.engine.collectives import Communication
from dmuon.engine.queue import Ticket
from dmuon.engine.runtime import find_runtime
from layouts import LAYOUTS, Sizes, build, data_rank

DEPTH, WIDTH = 4, 6
PATIENCE = 30.0  # seconds
Put = tuple[str, str, str]  # queue, phase, group


class Layer(nn.Module):
    """A matrix that all ranks use, and two experts, of which a rank uses one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_proj = nn.Linear(WIDTH, WIDTH)
        self.first_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, expert: str | None) -> torch.Tensor:
        x = x + torch.tanh(self.mix_proj(x))
        return x if expert is None else x + getattr(self, expert)(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor, expert: str | None, recompute: bool, twice: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            for _ in range(2 if twice and index == 1 else 1):
                if recompute:
                    x = checkpoint(layer, x, expert, use_reentrant=False)
                else:
                    x = layer(x, expert)
        return x


def expert_of(rank: int, step: int) -> str | None:
    """Every rank another one, and another one in each step."""
    return (None, "first_proj", "second_proj")[(rank + step) % 3]


@contextlib.contextmanager
def recorded(communication: Communication) -> Any:
    """What is put into both queues."""
    puts: list[Put] = []
    for name in ("weights", "gradients"):
        queue = getattr(communication, name)
        queue.on_put = lambda phase, group, name=name: puts.append((name, phase, group))
    try:
        yield puts
    finally:
        communication.weights.on_put = communication.gradients.on_put = None


WAYS = [
    {},
    {"micro": 2, "clip": True},
    {"recompute": True},
    {"twice": True},
    {"micro": 2, "recompute": True, "twice": True, "clip": True},
]


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int,
    *,
    steps: int = 2,
    micro: int = 1,
    recompute: bool = False,
    twice: bool = False,
    clip: bool = False,
) -> None:
    for step in range(steps):
        for number in range(micro):
            last = number + 1 == micro
            with contextlib.nullcontext() if last else dmuon.no_sync(model):
                x = torch.randn(3, WIDTH, requires_grad=True)
                model(x, expert_of(rank, step + number), recompute, twice).square().mean().backward()
        if clip:
            dmuon.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def in_every_way(sizes: Sizes, reshard: bool) -> list[list[Put]]:
    answers = []
    model = Model()
    optimizer = build(model, sizes, reshard=reshard)
    rank, _ = data_rank(sizes)
    for way in WAYS:
        with recorded(find_runtime(model).communication) as puts:
            train(model, optimizer, rank, **way)
            optimizer.synchronize()
        answers.append(puts)
    return answers


@pytest.mark.always("dp4-while_used", "hsdp2x2-while_used", "dp2-tp2-while_used", "ddp4-while_used")
@pytest.mark.parametrize("reshard", [True, False], ids=["while_used", "until_backward_done"])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_all_ranks_put_the_same_in_the_same_order(ranks, sizes, reshard):
    first, *others = ranks(4, in_every_way, sizes, reshard)
    for way, puts, *theirs in zip(WAYS, first, *others, strict=True):
        for rank, other in enumerate(theirs, start=1):
            assert other == puts, f"rank {rank}, {way}"
        reductions = [group for queue, phase, group in puts if queue == "gradients" and phase == "reduce"]
        assert reductions == [f"group 'layers.{k}'" for k in reversed(range(DEPTH))] * 2, way


def one_iteration() -> str:
    model = Model()
    optimizer = build(model, {"dp": 2})
    with recorded(find_runtime(model).communication) as puts:
        train(model, optimizer, data_rank({"dp": 2})[0], steps=1)
    return " ".join(phase[0] + group.split("'")[1].removeprefix("layers.") for _, phase, group in puts)


def test_the_order_of_an_iteration(ranks):
    """That of FSDP2: each reduction behind the gather of the layer after the next."""
    forward, backward = "g0 g1 g2 g3", "g3 g2 g1 r3 g0 r2 r1 r0"
    assert ranks(2, one_iteration) == [f"{forward} {backward}"] * 2


# Memory


def groups_with_gradients(sizes: Sizes) -> list[set[str]]:
    """The groups that have whole gradients, or packed ones, each time a layer's backward is over.

    A reduction is as slow as can be: it begins when the computation waits for it.
    """
    model = Model()
    optimizer = build(model, sizes)
    runtime = find_runtime(model)
    rank, _ = data_rank(sizes)
    train(model, optimizer, rank, steps=1)
    alive: list[tuple[str, weakref.ref]] = []
    seen: list[set[str]] = []
    held: dict[str, threading.Event] = {}  # reductions, by group
    queue = runtime.communication.gradients
    real_take, real_pack, real_wait = Buffer.take_gradients, Buffer._pack, Ticket.wait

    def watch(label: str, tensor: torch.Tensor) -> torch.Tensor:
        alive.append((label, weakref.ref(tensor)))
        return tensor

    def take_gradients(buffer: Buffer) -> list[torch.Tensor | None]:
        # Under tensor parallelism, these are other tensors than before.
        return [t if t is None else watch(buffer.label, t) for t in real_take(buffer)]

    def pack(buffer: Buffer, *args: Any) -> torch.Tensor:
        return watch(buffer.label, real_pack(buffer, *args))

    def hold(phase: str, group: str) -> None:
        if phase == "reduce":
            held[group] = threading.Event()
            queue.put("hold", group, partial(held[group].wait, PATIENCE))

    def wait(ticket: Ticket) -> Any:
        if ticket._phase == "reduce":
            held[ticket._group].set()
        return real_wait(ticket)

    def look(_: torch.Tensor) -> None:
        deadline = time.monotonic() + PATIENCE / 10
        while True:  # gloo's own threads let go of buffers a little later
            seen.append({label for label, tensor in alive if tensor() is not None})
            if len(seen[-1]) <= 2 or time.monotonic() > deadline:
                break
            seen.pop()
            time.sleep(0.01)

    def arrive(label: str, param: torch.Tensor) -> None:
        watch(label, param.grad)

    for group in runtime.groups:
        for param in group.params:
            param.gathered.register_post_accumulate_grad_hook(partial(arrive, group.label))
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: args[0].register_hook(look) and None)
    Buffer.take_gradients, Buffer._pack, Ticket.wait = take_gradients, pack, wait
    queue.on_put = hold
    try:
        train(model, optimizer, rank, steps=2)
    finally:
        Buffer.take_gradients, Buffer._pack, Ticket.wait = real_take, real_pack, real_wait
        queue.on_put = None  # other models have the same queue
    return seen


@pytest.mark.always("dp4", "hsdp2x2", "dp2-tp2", "ddp4")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_two_groups_at_most_have_gradients_at_any_time(ranks, sizes):
    names = [f"group 'layers.{k}'" for k in range(DEPTH)]
    one_on_its_way = [{names[3]}, {names[2], names[3]}, {names[1], names[2]}, {names[0], names[1]}]
    for seen in ranks(4, groups_with_gradients, sizes):
        assert seen == one_on_its_way * 2
