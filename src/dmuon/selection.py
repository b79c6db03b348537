"""Which parameters are dedicated when the user does not say: the 2-D weights of hidden layers.

Decided from module types and global shapes alone, so that every rank, and a model on the meta device, comes
to the same answer. Names play no part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn as nn

from .base import block_modules, enclosing

Predicate = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Candidate:
    """A parameter, and the one place where it stands."""

    name: str  # fully qualified
    module: nn.Module  # that holds it
    attribute: str
    param: nn.Parameter


def candidates(model: nn.Module) -> list[Candidate]:
    """All parameters in module order, a tied one once."""
    found: dict[int, Candidate] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                name = f"{module_name}.{attribute}" if module_name else attribute
                found.setdefault(id(param), Candidate(name, module, attribute, param))
    return list(found.values())


def tied_parameters(model: nn.Module) -> set[int]:
    """`id` of every parameter that stands in more than one place."""
    places = Counter(
        id(p) for module in model.modules() for p in module._parameters.values() if p is not None
    )
    return {param for param, count in places.items() if count > 1}


def hidden_matrices(model: nn.Module) -> set[int]:
    """`id` of the 2-D weights of hidden layers.

    A hidden matrix is the 2-D weight of a Linear, of an attention's input projection, or of a layer class
    that is not torch's own. Left out are embeddings, tied weights, and heads. A head is a matrix with a row
    or column per token of an embedding; where the model has none such (no embedding, or a padded
    vocabulary), it is the last matrix that stands outside the repeated blocks.
    """
    tied = tied_parameters(model)
    vocabularies = {
        m.num_embeddings for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
    }
    embeddings = {
        id(p)
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        for p in m._parameters.values()
    }
    matrices = [c for c in candidates(model) if c.param.ndim == 2 and _is_layer_weight(c)]
    heads = {id(c.param) for c in matrices if vocabularies.intersection(c.param.shape) and _is_last(c, model)}
    has_head = bool(heads) or bool(tied & embeddings)
    hidden = [c for c in matrices if id(c.param) not in heads | tied | embeddings]
    if not has_head and hidden:
        blocks = block_modules(model)
        outside = [c for c in hidden if enclosing(c.name.rpartition(".")[0], blocks) is None]
        hidden = [c for c in hidden if not outside or c is not outside[-1]]
    return {id(c.param) for c in hidden}


def _is_layer_weight(candidate: Candidate) -> bool:
    module, attribute = candidate.module, candidate.attribute
    if isinstance(module, nn.Linear):
        return attribute == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch and attribute == "weight" and not any(True for _ in module.children())


def _is_last(candidate: Candidate, model: nn.Module) -> bool:
    """Whether the matrix stands outside the repeated blocks, as a head does."""
    return enclosing(candidate.name.rpartition(".")[0], block_modules(model)) is None
