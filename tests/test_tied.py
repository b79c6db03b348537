"""A head that shares its weight with the embedding, beside dedicated matrices."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import dmuon
from layouts import RESIDENCIES, Sizes, build
from models import Transformer, assert_weights_close, backward_both, loss_of, step_both, with_oracle

pytestmark = pytest.mark.always("dp4", "ddp4")


def tied() -> nn.Module:
    model = Transformer(depth=2)
    model.head.weight = model.embed.weight
    return model


def train_tied(sizes: Sizes, reshard: bool) -> None:
    model = tied()
    oracle, reference = with_oracle(model)
    optimizer = build(model, sizes, reshard=reshard, adamw_lr=1e-3)
    in_groups = [id(param) for group in optimizer.param_groups for param in group["params"]]
    for step in range(3):
        backward_both(model, oracle, step)
        assert model.head.weight is model.embed.weight
        assert in_groups.count(id(model.embed.weight)) == 1
        gradient = dmuon.full_tensor(model.embed.weight.grad)  # AdamW would hide a wrong scale
        torch.testing.assert_close(gradient, oracle.embed.weight.grad, atol=1e-6, rtol=1e-5)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    state = get_model_state_dict(model)
    assert set(state) == set(oracle.state_dict())
    other = tied()
    build(other, sizes, reshard=reshard)
    set_model_state_dict(other, state)
    assert other.head.weight is other.embed.weight
    with torch.no_grad():
        torch.testing.assert_close(loss_of(other, 7), loss_of(oracle, 7), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("sizes", "reshard"), RESIDENCIES)
def test_a_tied_head_is_trained_as_one_weight(ranks, sizes, reshard):
    ranks(4, train_tied, sizes, reshard)
