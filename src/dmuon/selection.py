"""Which parameters are dedicated when the user does not say: the 2-D weights of hidden layers.

Decided from module types, global shapes and what a model says about itself (transformers' methods), so that
every rank, and a model on the meta device, comes to the same answer. Names of parameters play no part, but
that no "bias" is a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.nn as nn

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
    places = Counter(id(param) for module in model.modules() for param in _own(module))
    return {param for param, count in places.items() if count > 1}


def hidden_matrices(model: nn.Module) -> set[int]:
    """`id` of the 2-D weights of hidden layers: of every parameter that `why_not` has no reason against."""
    reasons = why_not(model)
    return {id(candidate.param) for candidate in candidates(model) if candidate.name not in reasons}


def why_not(model: nn.Module) -> dict[str, str]:
    """By name, why the default choice leaves a parameter to AdamW; hidden matrices are not in it.

    What the model does not say and shapes do not show is called "guessed". A hidden matrix is the 2-D weight
    of a Linear, of an attention's input projection, or of a layer class that is not torch's own, that is
    no embedding, no head, no router, not tied and no vector; or a stack of them, [experts, rows, columns],
    of a class with "Experts" in its name. Frozen parameters are judged like any other.
    """
    tied, embeddings = tied_parameters(model), _embeddings(model)
    reasons: dict[str, str] = {}
    matrices = []
    for candidate in candidates(model):
        reason = embeddings.get(candidate.module) or _no_matrix(candidate)
        if id(candidate.param) in tied:
            reason = f"{reason}, tied" if reason else "tied"
        if reason:
            reasons[candidate.name] = reason
        else:
            matrices.append(candidate)
    return reasons | _heads(model, matrices, embeddings)


def small_share_warning(model: nn.Module, chosen: Sequence[Candidate]) -> str | None:
    """What to tell the user where Muon gets less than half of the trainable elements; else None.

    chosen: what is dedicated, by default or by the user's predicate.
    """
    trainable = [candidate for candidate in candidates(model) if candidate.param.requires_grad]
    total = sum(candidate.param.numel() for candidate in trainable)
    muon = {id(candidate.param) for candidate in chosen}
    share = sum(c.param.numel() for c in trainable if id(c.param) in muon)
    if 2 * share >= total:
        return None
    reasons = why_not(model)
    elements: Counter[str] = Counter()
    example: dict[str, str] = {}
    for candidate in trainable:
        if id(candidate.param) not in muon:
            reason = reasons.get(candidate.name, "left out by the predicate")
            elements[reason] += candidate.param.numel()
            example.setdefault(reason, candidate.name)
    reason, count = elements.most_common(1)[0]
    return (
        f"Muon gets only {share / total:.0%} of the {total:,} trainable elements, AdamW the others. Most of "
        f"these, {count / total:.0%} of all, stay with AdamW for this reason: {reason} (such as "
        f"{example[reason]})."
    )


def predicate_warning(model: nn.Module, chosen: Sequence[Candidate]) -> str | None:
    """What to tell the user whose predicate has chosen embeddings or heads; None if it has not."""
    reasons = why_not(model)
    found = [c.name for c in chosen if reasons.get(c.name, "").startswith(("embedding", "head"))]
    if not found:
        return None
    text = ", ".join(f"{name} ({reasons[name]})" for name in found[:4])
    return (
        f"predicate gives Muon what looks like an embedding or a head: {text}{', ...' if found[4:] else ''}. "
        "Muon is meant for the matrices of hidden layers; AdamW usually trains these better."
    )


# Blocks


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model: the elements of its outermost lists, whatever they are called.

    Lists are ModuleLists, Sequentials, and ModuleDicts that are used like one. An element that cannot be
    called itself (a ModuleDict of layers, say) stands for its children. Elements that are single layers (a
    Sequential of Linear and ReLU) are no blocks. Modules of the classes that a transformers model names in
    `_no_split_modules` are blocks wherever they stand.
    """
    classes = {name for module in model.modules() for name in _no_split_modules(module)}
    blocks: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        is_list = _is_list(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            in_list = is_list and any(True for _ in child.children())
            if is_callable(child) and (in_list or not classes.isdisjoint(_class_names(child))):
                blocks[path] = child
            else:
                visit(path, child)

    visit("", model)
    return blocks


def _no_split_modules(module: nn.Module) -> list[str]:
    """The classes of blocks that a transformers model names; it names those of its embeddings, too."""
    return [c for c in getattr(type(module), "_no_split_modules", None) or () if not _sounds_like_table(c)]


def _is_list(module: nn.Module) -> bool:
    """Whether a container is a list of like things, not one thing's parts by name.

    A ModuleDict is, if its keys are numbers (then it may have one element, in a pipeline stage), or if it has
    several elements of one class. It is none if they have embeddings: these are whole models.
    """
    if not isinstance(module, nn.ModuleDict):
        return isinstance(module, (nn.ModuleList, nn.Sequential))
    if all(key.isdecimal() for key in module):
        return True
    of_one_class = len({type(child) for child in module.values()}) == 1
    return of_one_class and len(module) > 1 and not any(_is_table(m) for m in module.modules())


def is_callable(module: nn.Module) -> bool:
    """Whether the module has a forward of its own, so that hooks on it can fire."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__  # torch.compile's


def enclosing(name: str, boundaries: Container[str]) -> str | None:
    """The innermost of the modules `boundaries` (by name) that contains the module `name`, or is it.

    boundaries: a dict or a set; asked once per level of the name, however many they are.
    """
    while name not in boundaries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


# Embeddings, heads, and what is no matrix


def _embeddings(model: nn.Module) -> dict[nn.Module, str]:
    """The modules whose own parameters are embeddings, and what says so."""
    said = _said(model, "get_input_embeddings")
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            found[module] = "embedding"
        elif module in said:
            found[module] = "embedding: get_input_embeddings"
        elif _is_table(module):
            found[module] = "embedding: guessed by the name of its class"
    return found


def _heads(
    model: nn.Module, matrices: Sequence[Candidate], embeddings: Mapping[nn.Module, str]
) -> dict[str, str]:
    """By name, which of the matrices are heads, and what says so.

    matrices: the model's, without embeddings and tied ones.
    embeddings: as `_embeddings` returns them.
    """
    said = _said(model, "get_output_embeddings")
    heads = {c.name: "head: get_output_embeddings" for c in matrices if c.module in said}

    # The rest goes by shapes outside the blocks: inside, a width may equal the vocabulary, and a table may be
    # one of relative positions.
    blocks = block_modules(model)
    paths = dict(model.named_modules())
    outside = [c for c in matrices if c.param.ndim == 2 and enclosing(_parent(c.path), blocks) is None]
    tables = [m for path, m in paths.items() if m in embeddings and enclosing(path, blocks) is None]

    sizes = [p.shape for m in tables if not isinstance(m, nn.Linear) for p in _own(m) if p.ndim == 2]
    # A number of entries that is a width, too, tells nothing.
    vocabularies = {entries for entries, _ in sizes} - {width for _, width in sizes}
    for candidate in outside:
        # Other classes than Linear may keep their weight transposed.
        rows = candidate.param.shape[: 1 if isinstance(candidate.module, nn.Linear) else 2]
        if vocabularies.intersection(rows):
            heads.setdefault(candidate.name, "head: a row for each entry of an embedding")

    in_embeddings = {id(param) for module in embeddings for param in _own(module)}
    tied_heads = [
        clean_name(f"{path}.{attribute}")
        for path, module in paths.items()
        if module not in embeddings
        for attribute, param in module._parameters.items()
        if id(param) in in_embeddings
    ]
    # Outputs that are as many as no matrix takes in leave the model. With neither embedding nor blocks it may
    # be a part of one, such as a stage of a pipeline, that ends with a hidden layer: then only these count.
    inputs = {c.param.shape[1] for c in candidates(model) if c.param.ndim == 2 and c.module not in embeddings}
    may_guess = outside and (tables or blocks or _outputs(outside[-1]) not in inputs)
    if may_guess and not heads and not tied_heads:
        last = outside[-1]
        heads[last.name] = "head: guessed, last matrix outside the blocks"
        for candidate in outside:  # such as CLIP's projections of texts and images into one space
            if _level(candidate.name) == _level(last.name) and _outputs(candidate) == _outputs(last):
                heads.setdefault(candidate.name, "head: guessed, beside the last matrix, as many outputs")
    levels = {_level(name) for name in [*heads, *tied_heads]}
    # Such as a value head. Without blocks, all kinds of hidden layers may stand beside the head.
    for candidate in outside if blocks else ():
        if _level(candidate.name) in levels and _outputs(candidate) not in inputs:
            heads.setdefault(candidate.name, "head: guessed, beside a head, outputs that no layer takes in")
    return heads


def _said(model: nn.Module, method: str) -> set[nn.Module]:
    """The modules that `method` of the model, or of a model inside, returns, with all that is in them."""
    said: set[nn.Module] = set()
    for module in model.modules():
        if hasattr(type(module), method):
            try:
                answer = getattr(module, method)()
            except (AttributeError, KeyError, NotImplementedError, TypeError):
                continue  # transformers models that have none raise, and stages that have lost theirs
            if isinstance(answer, nn.Module):
                said.update(answer.modules())
    return said


def _is_table(module: nn.Module) -> bool:
    """Whether the module is an embedding by its class. Rotary ones have no parameters, and are none."""
    return any(map(_sounds_like_table, _class_names(module))) and any(True for _ in _own(module))


def _sounds_like_table(class_name: str) -> bool:
    return class_name.endswith(("Embedding", "Embeddings", "EmbeddingBag"))


def _sounds_like_router(class_name: str) -> bool:
    return class_name.endswith(("Router", "Gate"))


def _class_names(module: nn.Module) -> list[str]:
    """The names of its class and of those that this one is derived from; `fully_shard` derives new ones."""
    return [cls.__name__ for cls in type(module).__mro__]


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that stand in the module itself."""
    return (param for param in module._parameters.values() if param is not None)


def _outputs(candidate: Candidate) -> int:
    return candidate.param.shape[0]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _level(name: str) -> str:
    """What the layer of a weight stands in."""
    return _parent(_parent(name))


def _no_matrix(candidate: Candidate) -> str | None:
    """Why a parameter is no matrix of a layer; None if it is one."""
    param, module = candidate.param, candidate.module
    if param.ndim < 2 or param.numel() <= max(param.shape):
        return "vector"
    if isinstance(module, nn.modules.conv._ConvNd):
        return f"{param.ndim}-D: convolution"
    if any(map(_sounds_like_router, _class_names(module))):
        return "router: by the name of its class"
    if param.ndim > 2:
        holds = any("Experts" in name for name in _class_names(module)) and "bias" not in candidate.attribute
        return None if holds else f"{param.ndim}-D: stack of matrices"
    if isinstance(module, nn.RNNBase):
        return "recurrent layer"
    return None if _is_layer_weight(candidate) else "not the weight of a layer"


def _is_layer_weight(candidate: Candidate) -> bool:
    module, attribute = candidate.module, candidate.attribute
    if isinstance(module, nn.Linear):
        return attribute == "weight"
    if isinstance(module, nn.MultiheadAttention):
        return attribute.endswith("proj_weight")
    of_torch = type(module).__module__.startswith("torch.nn.")
    return not of_torch and attribute == "weight" and not any(True for _ in module.children())
