"""Which matrices a parameter holds: views, shapes, and the way back."""

import pytest
import torch

from dmuon.structure import PLAIN, Structure

CASES = {
    "plain": (PLAIN, (3, 4), [(1, 3, 4)]),
    "stack": (PLAIN, (5, 3, 4), [(5, 3, 4)]),
    "layers of experts": (PLAIN, (2, 5, 3, 4), [(10, 3, 4)]),
    "grouped queries": (Structure(sizes=(4, 2, 2)), (8, 3), [(1, 4, 3), (1, 2, 3), (1, 2, 3)]),
    "interleaved heads": (Structure(sizes=(2, 2, 2), repeats=3), (18, 5), [(1, 6, 5)] * 3),
    "heads apart": (Structure(sizes=(2,), repeats=3, apart=True), (6, 5), [(3, 2, 5)]),
    "inputs": (Structure(sizes=(2, 3), dim="in"), (4, 5), [(1, 4, 2), (1, 4, 3)]),
    "input heads": (Structure(sizes=(2,), repeats=3, apart=True, dim="in"), (4, 6), [(3, 4, 2)]),
    "input repeats": (Structure(sizes=(1, 1), repeats=3, dim="in"), (4, 6), [(1, 4, 3)] * 2),
    "transposed": (Structure(transposed=True), (3, 4), [(1, 4, 3)]),
    "transposed, fused": (Structure(sizes=(2, 4), transposed=True), (3, 6), [(1, 2, 3), (1, 4, 3)]),
    "gate and up": (Structure(sizes=(2, 2)), (5, 4, 3), [(5, 2, 3)] * 2),
    "interleaved experts": (Structure((1, 1), 2, transposed=True), (5, 3, 4), [(5, 2, 3)] * 2),
    "kernel": (Structure(kernel=2), (6, 2, 3, 3), [(1, 6, 18)]),
}


@pytest.mark.parametrize(("structure", "shape", "expected"), CASES.values(), ids=CASES)
def test_matrices_come_out_and_go_back(structure, shape, expected):
    structure.check("w", shape)
    assert structure.matrices(shape) == expected
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    copies = tensor.new_zeros(2, *shape)
    batch = torch.stack([tensor, tensor + 1000])  # two parameters of one shape, in one batch
    for kind, part, target in zip(expected, structure.parts(batch), structure.parts(copies), strict=True):
        matrices = structure.as_matrices(part)
        assert matrices.shape == (2 * kind[0], *kind[1:])
        structure.write(target, matrices)
    torch.testing.assert_close(copies, batch, rtol=0, atol=0)


def test_the_elements_of_a_fused_projection_are_those_of_the_separate_ones():
    queries, keys, values = (torch.randn(3, 2, 5) for _ in range(3))  # three heads of two
    fused = torch.stack([queries, keys, values], dim=1).reshape(18, 5)
    structure = Structure(sizes=(2, 2, 2), repeats=3)
    for part, separate in zip(structure.parts(fused), (queries, keys, values), strict=True):
        torch.testing.assert_close(structure.as_matrices(part)[0], separate.reshape(6, 5), rtol=0, atol=0)


def test_a_convolution_is_out_by_in_times_kernel():
    weight = torch.randn(6, 2, 3, 3)
    (part,) = Structure(kernel=2).parts(weight)
    torch.testing.assert_close(Structure(kernel=2).as_matrices(part)[0], weight.reshape(6, 18))


@pytest.mark.parametrize("sizes", [(4, 2), (4, 4, 2)])
def test_sizes_that_do_not_add_up_are_refused_by_name(sizes):
    with pytest.raises(ValueError, match=r"layers\.0\.qkv\.weight has shape \(8, 2\): its 8 outputs"):
        Structure(sizes=sizes).check("layers.0.qkv.weight", (8, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": (0,)}, "at least 1"),
        ({"repeats": 2}, "2 repeats of what"),
        ({"dim": "rows"}, 'must be "out" or "in"'),
        ({"kernel": 2, "transposed": True}, "cannot be transposed"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Structure(**settings)


def test_too_few_dims_are_refused():
    with pytest.raises(ValueError, match="too few dims"):
        Structure(kernel=2).check("conv.weight", (6, 2, 3))
