"""Reductions as on CUDA, where a side stream takes them to their ends as soon as they are launched.

With a stand-in for the stream, whose waits are the host's: so overlap is lost, and order and arithmetic are
as there.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from dmuon import channels
from dmuon.comm import Channel
from dmuon.engine.runtime import find_runtime
from layouts import LAYOUTS, Model, Sizes, build, loss_of
from models import agreed, assert_weights_close, backward_both, step_both, with_oracle


class HostSide:
    """Records what is asked of it."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.is_ahead = False
        self.unjoined = False

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        self.is_ahead = self.unjoined = True
        yield
        self.is_ahead = False

    def keep(self, buffer: torch.Tensor) -> None:
        self.kept.append(buffer)

    def join(self) -> None:
        self.unjoined = False


def train(sizes: Sizes, accumulate: int) -> tuple[int, int, list[tuple[str, str, bool]]]:
    """Three steps equal to the oracle's; buffers kept, reductions begun, and all collectives in order."""
    original, channels.side_stream = channels.side_stream, lambda device: HostSide()
    try:
        torch.manual_seed(1)
        model = Model()
        oracle, reference = with_oracle(model)
        optimizer = build(model, sizes)
    finally:
        channels.side_stream = original
    runtime = find_runtime(model)
    side = runtime._channels.side
    issued: list[tuple[str, str, bool]] = []
    runtime.traffic.on_issue = lambda phase, label, begin, work: issued.append((phase, label, side.is_ahead))
    for step in range(3):
        for micro in range(accumulate):
            backward_both(model, oracle, accumulate * step + micro, loss_of)
            assert not side.unjoined
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    reductions = sum(phase == "reduce" for phase, _, _ in issued)
    return len(side.kept), reductions, issued


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_training_equals_the_oracle(ranks, sizes, accumulate):
    answers = ranks(4, train, sizes, accumulate)
    for kept, reductions, issued in answers:
        assert kept == reductions > 0  # each buffer that a reduction begins with
        for phase, _, ahead in issued:
            if phase in ("reduce_replicas", "sum_copies", "exchange"):
                assert ahead, f"{phase} was issued on the stream of the computation"
            else:
                assert not ahead, f"{phase} was issued on the side stream"
    first = answers[0][2]
    for _, _, other in answers[1:]:
        # What two ranks both issue, they issue in one order, whatever the process groups.
        common = set(first) & set(other)
        assert [issue for issue in first if issue in common] == [issue for issue in other if issue in common]


def test_without_one_the_computation_looks_for_itself(ranks):
    assert agreed(ranks, (1,), has_no_side) is True


def has_no_side(shape: tuple[int, ...]) -> bool:
    model = Model()
    build(model, {"dp": 1})
    return find_runtime(model)._channels.side is None


def connect(sizes: Sizes) -> tuple[bool, bool]:
    """Every channel once, as is done at the start where connecting blocks the host.

    Whether these were all channels, and whether it counted as traffic of the training.
    """
    model = Model()
    build(model, sizes)
    runtime = find_runtime(model)
    before = dict(runtime.traffic.collectives)
    every = runtime._channels._every()
    for channel in every:
        channel.connect(torch.device("cpu"))
    values = vars(runtime._channels).values()
    made = [v for value in values for v in (value.values() if isinstance(value, dict) else [value])]
    complete = every == [channel for channel in made if isinstance(channel, Channel)]
    return complete, runtime.traffic.collectives != before


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_all_process_groups_can_be_connected_in_one_order(ranks, sizes):
    assert ranks(4, connect, sizes) == [(True, False)] * 4
