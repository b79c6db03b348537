"""Where tensors lie in a flat buffer: properties that hold for any of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmuon.engine.packing import Packing

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8]


@st.composite
def packings(draw) -> tuple[Packing, list[tuple]]:
    """With its keys: of one to three elements, the last of which may be a tuple, as the engine's is."""
    last = st.sampled_from([(), (0,), (0, 2)])
    key = draw(
        st.sampled_from(
            [
                st.tuples(st.integers(0, 3)),
                st.tuples(st.integers(0, 3), st.integers(0, 2)),
                st.tuples(st.integers(0, 2), st.integers(0, 1), last),
            ]
        )
    )
    keys = sorted(draw(st.lists(key, max_size=8)))
    numels = draw(st.lists(st.integers(0, 40), min_size=len(keys), max_size=len(keys)))
    packing = Packing(keys, numels, draw(st.sampled_from(DTYPES)), counts=draw(st.booleans()))
    return packing, keys


def beginnings(keys: list[tuple]) -> set[tuple]:
    return {key[:length] for key in keys for length in range(len(key) + 1)}


@given(packings())
def test_tensors_are_aligned_and_apart(case):
    packing, keys = case
    places = [range(o, o + n) for o, n in zip(packing.offsets, packing.numels, strict=True)]
    places += [range(count, count + 1) for count in packing.counts]
    elements = [element for place in places for element in place]
    assert len(elements) == len(set(elements))
    assert set(elements) <= set(range(packing.total))
    size = packing.dtype.itemsize
    assert all(offset * size % 16 == 0 for offset in [*packing.offsets, packing.total])
    assert (packing.total - len(elements)) * size < 16 * (len(keys) + len(set(keys)) + 1)  # and no gaps


@given(packings())
def test_a_span_has_all_whose_keys_begin_so_and_nothing_else(case):
    packing, keys = case
    for beginning in beginnings(keys):
        span = packing.span(*beginning)
        assert packing.dtype.itemsize * span.start % 16 == 0
        for index, (key, offset, numel) in enumerate(zip(keys, packing.offsets, packing.numels, strict=True)):
            ends = [(offset, offset + numel)]
            ends += [(count, count + 1) for count in packing.counts[index : index + 1]]
            for begin, end in ends:
                if key[: len(beginning)] == beginning:
                    assert span.start <= begin <= end <= span.stop
                else:
                    assert end <= span.start or begin >= span.stop


@given(packings())
def test_counts_follow_the_tensors_of_their_key_in_a_row(case):
    packing, keys = case
    if not packing.counts:
        return
    assert len(packing.counts) == len(keys)
    for key in set(keys):
        mine = [index for index, other in enumerate(keys) if other == key]
        counts = [packing.counts[index] for index in mine]
        assert counts == list(range(counts[0], counts[0] + len(mine)))
        assert all(packing.offsets[index] + packing.numels[index] <= counts[0] for index in mine)


@given(packings())
def test_parts_are_the_whole_of_a_span_counted_from_its_beginning(case):
    packing, keys = case
    for beginning in beginnings(keys):
        span, parts = packing.span(*beginning), packing.parts(*beginning)
        longer = [key for key in keys if len(key) > len(beginning)]
        following = {key[len(beginning)] for key in longer if key[: len(beginning)] == beginning}
        if not following:
            assert parts == []
            continue
        assert [element for element, _ in parts] == sorted(following)
        bounds = [0, *(part.stop for _, part in parts)]
        assert bounds[-1] == span.stop - span.start
        assert [part.start for _, part in parts] == bounds[:-1]
        for element, part in parts:
            own = packing.span(*beginning, element)
            assert (part.start, part.stop) == (own.start - span.start, own.stop - span.start)
    assert packing.span() == slice(0, packing.total)


@given(packings())
def test_what_goes_to_nobody_is_empty(case):
    packing, _ = case
    assert packing.span(7) == slice(0, 0)
    assert packing.parts(7) == []


@given(packings(), st.integers(1, 4))
def test_views_are_of_the_buffer_and_of_nothing_else(case, columns):
    packing, _ = case
    sizes = [(n // columns, columns) if n % columns == 0 else (n,) for n in packing.numels]
    shapes = [torch.Size(size) for size in sizes]
    buffer = torch.zeros(packing.total, dtype=packing.dtype)
    views = packing.views(buffer, shapes)
    assert [view.shape for view in views] == shapes
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    expected = torch.zeros_like(buffer)
    for number, (offset, numel) in enumerate(zip(packing.offsets, packing.numels, strict=True), start=1):
        expected[offset : offset + numel] = number
    assert torch.equal(buffer, expected)


def test_keys_that_do_not_ascend_are_a_mistake():
    with pytest.raises(AssertionError):
        Packing([(1,), (0,)], [3, 3], torch.float32)
