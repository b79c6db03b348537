"""What a rank keeps, by the storages of all tensors there are."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

from dmuon.engine.parameter import local_part
from dmuon.engine.runtime import Runtime, find_runtime
from layouts import Sizes, build

DEPTH, WIDTH, HIDDEN = 4, 32, 64
SLACK = 1024  # bytes, for inputs, counts of gradients and the like; a matrix has thousands
ACTIVATIONS = 4 * SLACK  # bytes, what a forward keeps for backward
PATIENCE = 5.0  # seconds, in which gloo's own threads let go of buffers

LAYOUTS = [
    pytest.param({"replicate": 2, "shard": 2}, id="hsdp2x2"),
    pytest.param({"ddp": 4}, id="ddp4"),
    pytest.param({"dp": 2, "tp": 2}, id="dp2-tp2"),
]


class Layer(nn.Module):
    """Nothing but matrices; under tensor parallelism cut by rows, by columns, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.mix_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix_proj(self.down_proj(torch.tanh(self.up_proj(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def storages() -> dict[int, int]:
    """Address and bytes of the storage of every tensor; a DTensor has none of its own."""
    found = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


class Meter:
    """The bytes that have come since this was made."""

    def __init__(self) -> None:
        gc.collect()
        self._before = set(storages())

    def __call__(self) -> int:
        return sum(nbytes for address, nbytes in storages().items() if address not in self._before)

    def settled(self, limit: int) -> int:
        """What there is, once it is no more than a limit, if it ever is."""
        deadline = time.monotonic() + PATIENCE
        while self() > limit and time.monotonic() < deadline:
            time.sleep(0.01)
        return self()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()


def at_rest(runtime: Runtime) -> dict[str, int]:
    params = runtime.params
    return {
        "weights": 4 * sum(p.piece_shape.numel() for p in params if p.keeps_weight),
        "momentum": 4 * sum(p.state_shape.numel() for p in params if p.keeps_state),
        "gradients": 4
        * sum(p.state_shape.numel() for p in params if p.keeps_state and p.resting.grad is not None),
        "updates": 2
        * sum(p.full_shape.numel() for g in runtime.groups for p in g.due if p.is_owner),  # bfloat16
    }


def after_a_step(sizes: Sizes) -> list[tuple[str, dict[str, int], int]]:
    meter = Meter()
    model = Model()
    optimizer = build(model, sizes, ns_dtype=torch.bfloat16)
    runtime = find_runtime(model)
    seen = []

    def look(when: str) -> None:
        for group in runtime.groups:
            group.wait()  # for what is on its way, no more
        kept = at_rest(runtime)
        seen.append((when, kept, meter.settled(sum(kept.values()) + SLACK)))

    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        backward(model)
        look("backward")
        optimizer.step()
        look("step")
        optimizer.synchronize()
        look("publish")
        optimizer.zero_grad()
        look("zero_grad")
    return seen


@pytest.mark.always("hsdp2x2", "ddp4")
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_after_a_step_a_rank_keeps_what_it_owns(ranks, sizes):
    answers = ranks(4, after_a_step, sizes)
    for seen in answers:
        for when, kept, measured in seen:
            expected = sum(kept.values())
            assert expected <= measured <= expected + SLACK, f"after {when}: {kept}"
    waiting = [kept["updates"] for seen in answers for when, kept, _ in seen if when == "step"]
    assert any(waiting) == ("ddp" not in sizes)  # under DDP, all go at once


def wholes_at_their_exchange() -> list[tuple[int, int]]:
    """Of each exchange of updates: the whole matrices that this rank sends, and how many there still are."""
    model = Model()
    optimizer = build(model, {"dp": 2, "tp": 2})
    runtime = find_runtime(model)
    backward(model)
    optimizer.step()
    wholes: dict[str, list[weakref.ref]] = {group.label: [] for group in runtime.groups}
    for group in runtime.groups:  # those behind the first two, which have been sent
        for param, update in group.due.items():
            if param.is_cut and update.orthogonal is not None:
                wholes[group.label].append(weakref.ref(update.orthogonal))
    seen: list[tuple[int, int]] = []
    real = runtime.communication.all_to_all

    def look(phase: str, label: str, *args: Any) -> None:
        mine = wholes[label]
        seen.append((len(mine), sum(whole() is not None for whole in mine)))
        real(phase, label, *args)

    runtime.communication.all_to_all = look
    optimizer.synchronize()
    return seen


def test_a_whole_matrix_is_freed_once_its_pieces_are_packed(ranks):
    answers = ranks(4, wholes_at_their_exchange)
    assert all(alive == 0 for seen in answers for _, alive in seen)
    assert sum(count for seen in answers for count, _ in seen) == 2 * (DEPTH - 2)


def weights_of_an_iteration(sizes: Sizes) -> list[tuple[str, int, int, int]]:
    """When it was, what is expected, what there is, how many gathered weights are not the resting ones."""
    meter = Meter()
    model = Model()
    optimizer = build(model, sizes)
    runtime = find_runtime(model)
    seen: list[tuple[str, int, int, int]] = []

    def look(when: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            copies = sum(
                local_part(param.gathered).data_ptr() != param.resting_local.data_ptr()
                for param in runtime.params
            )
            kept = sum(at_rest(runtime).values())
            measured = meter.settled(kept + ACTIVATIONS) if when in ("forward", "step") else kept
            seen.append((when, kept, measured, copies))

        return hook

    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    for layer in model.layers:
        layer.down_proj.register_forward_pre_hook(look("forward"))
        layer.down_proj.register_forward_hook(
            lambda module, args, out: out.register_hook(look("backward")) and None
        )
    backward(model)
    optimizer.step()
    optimizer.synchronize()
    look("step")()
    return seen


@pytest.mark.always("ddp2-tp2")
@pytest.mark.parametrize("sizes", [{"ddp": 4}, {"ddp": 2, "tp": 2}], ids=["ddp4", "ddp2-tp2"])
def test_under_ddp_there_is_no_second_copy_of_a_weight_at_any_time(ranks, sizes):
    for seen in ranks(4, weights_of_an_iteration, sizes):
        assert [when for when, *_ in seen] == ["forward"] * DEPTH + ["backward"] * DEPTH + ["step"]
        for when, kept, measured, copies in seen:
            assert copies == 0, when
            assert kept <= measured <= kept + ACTIVATIONS, when


def gathered_weights(reshard: bool) -> dict[str, list[float]]:
    """Of how many layers there are gathered weights, when each of them computes."""
    model = Model()
    build(model, {"dp": 2}, reshard=reshard)
    params = find_runtime(model).params
    layer = 4 * (2 * WIDTH * HIDDEN + WIDTH * WIDTH)
    seen: dict[str, list[float]] = {"forward": [], "backward": [], "end": []}

    def look(when: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            found = [local_part(param.gathered).untyped_storage() for param in params]
            seen[when].append(sum({s.data_ptr(): s.nbytes() for s in found if s.nbytes()}.values()) / layer)

        return hook

    backward(model)  # what is run after what
    for module in (each.down_proj for each in model.layers):
        module.register_forward_pre_hook(look("forward"))
        module.register_forward_hook(lambda _, args, out: out.register_hook(look("backward")) and None)
    backward(model)
    look("end")()
    return seen


def test_gathered_weights_live_as_long_as_their_residency_says(ranks):
    """Those of a layer and of the next one, which is prefetched; or all, until their backward is over."""
    forward_backward = {"forward": [2, 2, 2, 1], "backward": [2, 2, 2, 1], "end": [0]}
    assert ranks(2, gathered_weights, True) == [forward_backward] * 2
    kept = {"forward": [2, 3, 4, 4], "backward": [4, 3, 2, 1], "end": [0]}
    assert ranks(2, gathered_weights, False) == [kept] * 2
