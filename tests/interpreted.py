"""Our Triton kernel in Triton's interpreter, on the CPU: a script, since Triton decides at its import.

In float16: the interpreter multiplies bfloat16 as if it were integers.
"""

import itertools

import torch

from dmuon.optim.triton_product import symmetric_product

SIDES = [1, 15, 16, 17, 40]  # of the result; blocks are 16 x 16
INNER = [1, 16, 37]


def integers(*shape: int) -> torch.Tensor:
    """Small ones, so that sums are exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def check(side: int, inner: int, batch: int, tall: bool, has_plus: bool) -> None:
    x = integers(batch, inner, side).mT if tall else integers(batch, side, inner)
    gram = x.double() @ x.double().mT
    plus = (gram.half() + 1) if has_plus else None
    for alpha, beta in ((1.0, 0.0), (0.5, -1.5)):
        whole = torch.full((batch * side * side + 8,), torch.nan, dtype=torch.half)
        out = whole[: batch * side * side].view(batch, side, side)
        symmetric_product(x, x.mT, out=out, plus=plus, alpha=alpha, beta=beta, block=16, depth=16)
        expected = alpha * gram + (0 if plus is None else beta * plus.double())
        assert torch.equal(out, expected.half()), (side, inner, batch, tall, has_plus, alpha)
        assert whole[out.numel() :].isnan().all()


if __name__ == "__main__":
    kinds = itertools.cycle(itertools.product((1, 2), (False, True), (False, True)))
    for side, inner in itertools.product(SIDES, INNER):
        for kind in itertools.islice(kinds, 2):
            check(side, inner, *kind)
    print("all products are right")
