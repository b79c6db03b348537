"""`register_post_accumulate_grad_hook` on dedicated parameters fires as on FSDP2's."""

import pytest
import torch

import dmuon
from layouts import LAYOUTS, Model, Sizes, build, loss_of

pytestmark = pytest.mark.always("dp4", "hsdp2x2", "ddp2-tp2")


def hooked(sizes: Sizes) -> tuple[list[str], list[float], list[float]]:
    """Names in the order of the calls, the norms that the hooks saw, and those after backward."""
    model = Model()
    build(model, sizes)
    dedicated = {record.param_name: record.resting for record in dmuon.get_dedicated_params(model)}
    seen: list[tuple[str, float]] = []
    for name, param in dedicated.items():
        param.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad.norm().full_tensor().item()))
        )
    loss_of(model, 0).backward()
    first = list(seen)
    with dmuon.no_sync(model):
        loss_of(model, 1).backward()
    assert seen == first  # nothing has been reduced
    loss_of(model, 2).backward()
    last = dict(seen[len(first) :])
    after = [param.grad.norm().full_tensor().item() for param in dedicated.values()]
    assert len(seen) == 2 * len(dedicated)
    return [name for name, _ in first], [last[name] for name in dedicated], after


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_they_fire_once_for_each_reduced_backward(ranks, sizes):
    answers = ranks(4, hooked, sizes)
    assert all(answer == answers[0] for answer in answers)
    names, seen, after = answers[0]
    assert len(names) == len(set(names)) == 8
    assert seen == pytest.approx(after)


def stepping_in_hooks(sizes: Sizes) -> bool:
    """A gradient that a hook takes away is not stepped with."""
    model = Model()
    optimizer = build(model, sizes)
    record = dmuon.get_dedicated_params(model)[0]
    record.resting.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    before = dmuon.full_tensor(record.resting).clone()
    loss_of(model, 0).backward()
    optimizer.step()
    return torch.equal(before, dmuon.full_tensor(record.resting))


def test_a_hook_may_drop_the_gradient(ranks):
    assert all(ranks(4, stepping_in_hooks, {"dp": 4}))
