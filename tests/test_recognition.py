"""Which matrices the parameters of known libraries hold; and what the user says."""

import pytest
import torch
import torch.nn as nn

from dmuon.recognition import recognise, structures_of
from dmuon.selection import candidates
from dmuon.structure import PLAIN, Structure


def holds(model: nn.Module, spec=None) -> dict[str, list]:
    chosen = [c for c in candidates(model) if c.param.ndim > 1]
    structures = structures_of(chosen, spec, model)
    return {c.name: structures[c].matrices(c.param.shape) for c in chosen}


def test_attention_of_torch_holds_three_projections():
    held = holds(nn.MultiheadAttention(4, 2))
    assert held == {"in_proj_weight": [(1, 4, 4)] * 3, "out_proj.weight": [(1, 4, 4)]}


def test_a_convolution_is_one_matrix():
    assert holds(nn.Conv2d(3, 8, 5)) == {"weight": [(1, 8, 75)]}
    assert holds(nn.Conv1d(4, 8, 3, groups=2)) == {"weight": [(1, 8, 6)]}


@pytest.mark.parametrize("module", [nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(3, 8, 3)])
def test_a_convolution_that_is_no_matrix_is_refused_by_name(module):
    with pytest.raises(ValueError, match=r"weight is of a (depthwise|transposed) convolution"):
        holds(module)


def of_library(cls: type[nn.Module], name: str, **attributes) -> nn.Module:
    """A module of a class as the library has it, without the library."""
    module = type(name, (cls,), {"__module__": "transformers.models.any"})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


@pytest.mark.parametrize(
    ("name", "attributes", "outputs", "expected"),
    [
        ("GPTNeoXAttention", {"num_heads": 2}, 12, Structure((2, 2, 2), 2)),
        ("BloomAttention", {"num_heads": 4}, 12, Structure((1, 1, 1), 4)),
        (
            "FalconAttention",
            {"num_heads": 4, "head_dim": 2, "num_kv_heads": 2, "new_decoder_architecture": True},
            16,
            Structure((4, 2, 2), 2),
        ),
        (
            "FalconAttention",
            {"num_heads": 4, "head_dim": 2, "new_decoder_architecture": False, "multi_query": True},
            12,
            Structure((8, 2, 2)),
        ),
        ("LlamaAttention", {"num_heads": 2}, 12, None),
    ],
)
def test_fused_attention_is_known_by_its_class(name, attributes, outputs, expected):
    attention = of_library(nn.Module, name, **attributes)
    attention.query_key_value = nn.Linear(4, outputs, bias=False)
    model = nn.ModuleDict({"attention": attention})
    (candidate,) = candidates(model)
    assert recognise(candidate, dict(model.named_modules())) == expected


@pytest.mark.parametrize(
    ("attributes", "shape", "expected"),
    [
        ({"is_transposed": False, "is_concatenated": True}, (3, 8, 5), [(3, 4, 5)] * 2),
        ({"is_transposed": True, "is_concatenated": False}, (3, 5, 8), [(3, 4, 5)] * 2),
        ({"is_transposed": True, "is_concatenated": True, "has_gate": False}, (3, 5, 8), [(3, 8, 5)]),
        ({}, (3, 8, 5), [(3, 8, 5)]),
    ],
)
def test_experts_lie_as_transformers_says(attributes, shape, expected):
    experts = of_library(nn.Module, "AnyExperts", **attributes)
    experts.gate_up_proj = nn.Parameter(torch.zeros(shape))
    assert holds(experts) == {"gate_up_proj": expected}


def test_the_user_has_the_last_word():
    attention = nn.MultiheadAttention(4, 2)
    assert holds(attention, {"in_proj*": PLAIN})["in_proj_weight"] == [(1, 12, 4)]
    by_function = holds(
        attention, lambda name, param, module: Structure(transposed=True) if "out" in name else None
    )
    assert by_function["in_proj_weight"] == [(1, 4, 4)] * 3


def test_what_says_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no dedicated parameter has a name like '\*.typo'"):
        holds(nn.Linear(2, 2), {"*.typo": PLAIN})
    with pytest.raises(TypeError, match=r"structure must give a dmuon\.Structure for weight"):
        holds(nn.Linear(2, 2), {"weight": (1, 1)})
    with pytest.raises(TypeError, match="structure must be a dict of name patterns"):
        holds(nn.Linear(2, 2), "weight")
