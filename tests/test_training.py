"""Training on every mesh equals the single-process oracle."""

import pytest
import torch
import torch.distributed as dist

from models import (
    Transformer,
    assert_weights_close,
    build,
    loss_of,
    make_mesh,
    mean_backward,
    step_both,
    with_oracle,
)

pytestmark = pytest.mark.always("(4,)-True", "(2, 2)-False", "(1,)-True")

MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2,), (1,)]


def size(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result


def train(
    shape: tuple[int, ...], reshard: bool, asynchronous: bool, steps: int = 3
) -> dict[str, torch.Tensor]:
    model = Transformer()
    oracle, reference = with_oracle(model, lr=0.05, weight_decay=0.1, adamw_lr=3e-3, adamw_weight_decay=0.01)
    optimizer = build(
        model,
        make_mesh(shape),
        reshard_after_forward=reshard,
        lr=0.05,
        weight_decay=0.1,
        adamw_lr=3e-3,
        adamw_weight_decay=0.01,
        replicate_async=asynchronous,
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    weights = {}
    for step in range(steps):
        seeds = [1000 * step + r for r in range(world)]
        loss_of(model, seeds[rank]).backward()
        mean_backward(oracle, loss_of, seeds)
        step_both(optimizer, reference)
        weights = assert_weights_close(model, oracle)
    return weights


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_training_equals_the_oracle_on_every_mesh(ranks, shape, reshard):
    asynchronous = ranks(size(shape), train, shape, reshard, True)
    synchronous = ranks(size(shape), train, shape, reshard, False)
    for name, weight in asynchronous[0].items():
        assert torch.equal(weight, synchronous[0][name]), f"{name}: asynchronous publish changes the training"
