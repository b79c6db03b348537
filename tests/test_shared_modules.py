"""One Linear that several layers have, or a layer and the model: a group around all of them has it."""

import pytest
import torch
import torch.nn as nn

import dmuon
from dmuon.engine.runtime import find_runtime
from layouts import DDP_LAYOUTS, Sizes, distribute
from models import assert_weights_close, backward_both, step_both, with_oracle

LAYOUTS = [
    pytest.param({"dp": 4}, True, id="dp4-while_used"),
    pytest.param({"dp": 4}, False, id="dp4-until_backward_done"),
    pytest.param({"replicate": 2, "shard": 2}, True, id="hsdp2x2"),
    pytest.param(*DDP_LAYOUTS[0].values, True, id="ddp4"),
]


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own_proj = nn.Linear(6, 6, bias=False)
        self.shared_proj = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared_proj(torch.tanh(self.own_proj(x)))


class Model(nn.Module):
    """Layers 0 and 1 have one Linear, layers 2 and the model itself another one."""

    def __init__(self) -> None:
        super().__init__()
        two = [nn.Linear(6, 6, bias=False) for _ in range(2)]
        self.layers = nn.ModuleList(Layer(shared) for shared in (two[0], two[0], two[1]))
        self.last_proj = two[1]
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last_proj(x))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def train(sizes: Sizes, reshard: bool) -> dict[str, list[str]]:
    torch.manual_seed(0)
    model = Model()
    oracle, reference = with_oracle(model)
    distribute(model, sizes, reshard=reshard)
    optimizer = dmuon.Muon(model)
    for step in range(3):
        backward_both(model, oracle, step, loss_of)
        step_both(optimizer, reference)
        assert_weights_close(model, oracle)
    return {group.name: [param.param_name for param in group.params] for group in find_runtime(model).groups}


@pytest.mark.parametrize(("sizes", "reshard"), LAYOUTS)
def test_training_equals_the_oracle(ranks, sizes, reshard):
    groups = ranks(4, train, sizes, reshard)[0]
    shared = ["layers.0.shared_proj.weight", "layers.2.shared_proj.weight"]
    assert sorted(groups.pop("the root module")) == shared
    assert all(names == [f"{layer}.own_proj.weight"] for layer, names in groups.items())
    assert len(groups) == 3
