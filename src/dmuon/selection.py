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

    path: str  # where it stands in the model
    module: nn.Module  # that holds it
    attribute: str
    param: nn.Parameter

    @property
    def name(self) -> str:
        """Its fully qualified name."""
        return clean_name(self.path)


def clean_name(path: str) -> str:
    """A fully qualified name without what `torch.compile` and checkpoint wrappers add, as in checkpoints."""
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        path = path.replace(f"{wrapper}.", "")
    return path


def candidates(model: nn.Module) -> list[Candidate]:
    """All parameters in module order, a tied one once."""
    found: dict[int, Candidate] = {}
    for module_name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                path = f"{module_name}.{attribute}" if module_name else attribute
                found.setdefault(id(param), Candidate(path, module, attribute, param))
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
    that is not torch's own. Left out are embeddings, tied weights, vectors (one row or one column), and
    heads. A head stands outside the repeated blocks and has a row or column per token of an embedding;
    where the model has none such (no embedding, a padded vocabulary, or one of the size of the width, which
    tells nothing), it is the last matrix outside the blocks.
    """
    tied = tied_parameters(model)
    tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    embeddings = {id(p) for m in tables for p in m._parameters.values()}
    vocabularies = {m.num_embeddings for m in tables} - {m.embedding_dim for m in tables}
    blocks = block_modules(model)

    matrices = [c for c in candidates(model) if id(c.param) not in tied | embeddings and _is_layer_matrix(c)]
    outside = [c for c in matrices if enclosing(c.path.rpartition(".")[0], blocks) is None]
    heads = {id(c.param) for c in outside if vocabularies.intersection(c.param.shape)}
    if outside and not heads and not tied & embeddings:
        heads = {id(outside[-1].param)}
    return {id(c.param) for c in matrices} - heads


def _is_layer_matrix(candidate: Candidate) -> bool:
    return candidate.param.ndim == 2 and min(candidate.param.shape) > 1 and _is_layer_weight(candidate)


def _is_layer_weight(candidate: Candidate) -> bool:
    module, attribute = candidate.module, candidate.attribute
    if isinstance(module, nn.Linear):
        return attribute == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch and attribute == "weight" and not any(True for _ in module.children())
