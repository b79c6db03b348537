"""Loss scaling, and steps that are skipped: decided alike on every rank, and without a trace."""

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.engine.parameter import local_part
from layouts import LAYOUTS, Model, build, data_rank, loss_of
from models import assert_weights_close, full_weights, mean_backward, with_oracle

pytestmark = pytest.mark.always(
    "dp4-(0, 'layers.0.up_proj.weight')", "dp4-(1, 'head.weight')", "ddp2-tp2-(0, 'head.weight')", "ddp2-tp2"
)


def scaled(sizes: dict[str, int], stock: bool, bad: tuple[int, str]) -> None:
    """In step 1 a gradient gets an infinity: `bad` says on which rank and in which parameter."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    scaler = (torch.amp.GradScaler if stock else dmuon.GradScaler)("cpu", init_scale=1024.0)
    mine, replicas = data_rank(sizes)
    bad_rank, bad_name = bad
    for step in range(4):
        before = full_weights(model)
        scaler.scale(loss_of(model, 10 * step + mine)).backward()
        if step == 1:
            gradient = local_part(model.get_parameter(bad_name).grad)
            kept = torch.tensor(float(gradient.numel() > 0 and dist.get_rank() >= bad_rank))
            if kept:
                gradient.view(-1)[0] = float("inf")
            dist.all_reduce(kept)
            assert kept > 0
        scaler.unscale_(optimizer)
        norm = dmuon.clip_grad_norm_(model, 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert bool(norm.isfinite()) == (step != 1)
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)
        if step == 1:
            for name, weight in full_weights(model).items():
                assert torch.equal(weight, before[name]), name
            continue
        mean_backward(oracle, loss_of, [10 * step + rank for rank in range(replicas)])
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        assert_weights_close(model, oracle)


BAD = [(0, "layers.0.up_proj.weight"), (0, "layers.1.mix_proj.weight"), (0, "head.weight")]


@pytest.mark.always("dp4-(0, 'layers.0.up_proj.weight')", "ddp2-tp2-(0, 'head.weight')")
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_gradient_scaler(ranks, sizes, bad):
    ranks(4, scaled, sizes, False, bad)


@pytest.mark.always("dp4-(0, 'layers.0.up_proj.weight')")
@pytest.mark.parametrize("bad", [*BAD[:2], (1, "head.weight")], ids=str)
@pytest.mark.parametrize("sizes", LAYOUTS[:2])
def test_torchs_own_on_one_mesh(ranks, sizes, bad):
    ranks(4, scaled, sizes, True, bad)


def skipped(sizes: dict[str, int]) -> None:
    """By hand: a step that is not taken leaves nothing behind."""
    torch.manual_seed(1)
    model = Model()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes)
    mine, replicas = data_rank(sizes)
    for step in range(4):
        loss = loss_of(model, 10 * step + mine)
        (loss * float("nan") if step == 1 and mine == 0 else loss).backward()
        norm = dmuon.clip_grad_norm_(model, 0.05)
        assert bool(norm.isfinite()) == (step != 1)
        if norm.isfinite():
            optimizer.step()
            mean_backward(oracle, loss_of, [10 * step + rank for rank in range(replicas)])
            torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.05)
            reference.step()
            reference.zero_grad()
        optimizer.zero_grad()
        assert_weights_close(model, oracle)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_skipping_by_hand(ranks, sizes):
    ranks(4, skipped, sizes)
