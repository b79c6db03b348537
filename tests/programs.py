"""What the tests of other libraries share: the training that theirs must equal, and the table of the docs.

`pytest --all --write-programs tests/test_lightning.py ...` writes the rows of that run into docs/programs.md.
"""

import copy
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn as nn

import dmuon
from models import Transformer
from reference import ReferenceMuon

PAGE = Path(__file__).parents[1] / "docs" / "programs.md"
VOCABULARY = 11


def tokens_of(seed: int, rows: int = 2, length: int = 7) -> torch.Tensor:
    """Token ids that the seed determines."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def loss_on(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss of a model that returns logits."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def seeded(seed: int = 1, build: Callable[[], nn.Module] = Transformer) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def dedicated_names(model: nn.Module) -> set[str]:
    """Names of the dedicated parameters, without what a program puts in front of them."""
    return {param.param_name for param in dmuon.get_dedicated_params(model)}


def train_alone(
    model: nn.Module,
    chosen: set[str],
    batches: Sequence[Sequence[torch.Tensor]],
    *,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_on,
    max_norm: float | None = None,
    after_step: Callable[[int, ReferenceMuon], None] | None = None,
    spared: Callable[[str], bool] | None = None,
    **settings: object,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: a copy of the model, one process, the mean of the losses of each step's batches.

    spared: names of AdamW's parameters that have no weight decay.

    Returns the weights, and the norm of the gradient in each step.
    """
    model = copy.deepcopy(model)
    optimizer = ReferenceMuon(model, lambda name, _: name in chosen, **settings)
    if spared is not None and optimizer.adamw is not None:
        without = [param for name, param in model.named_parameters() if spared(name)]
        rest = optimizer.adamw.param_groups[0]
        rest["params"] = [param for param in rest["params"] if all(param is not other for other in without)]
        optimizer.adamw.add_param_group({"params": without, "weight_decay": 0.0})
    norms = []
    for step, parts in enumerate(batches):
        for part in parts:
            (loss(model, part) / len(parts)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        norms.append(norm.item())
        optimizer.step()
        model.zero_grad()
        if after_step is not None:
            after_step(step, optimizer)
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, whole, on every rank."""
    return {name: dmuon.full_tensor(param).detach().clone() for name, param in model.named_parameters()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element; the names must be the same."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


# The table in the documentation

BEGIN, END = "<!-- the table is written by a test run -->\n", "<!-- its end -->\n"
ROWS: dict[tuple[str, str], str] = {}


def note(program: str, form: str, found: dict[str, float] | str) -> None:
    """A row of the table: differences by what was tried, or what is refused and why.

    Fails if a difference is more than rounding, and if the page has no row for it, unless the table is to be
    written in the end.
    """
    assert isinstance(found, str) or all(value <= 1e-5 for value in found.values()), found
    version = importlib.metadata.version(program)
    text = found if isinstance(found, str) else ", ".join(f"{key} {found[key]:.0e}" for key in found)
    row = f"{program} {version}", form
    ROWS[row] = f"refused: {text}" if isinstance(found, str) else f"equal: {text}"
    assert WRITING or f"| {row[0]} | {form} | {ROWS[row].split(':')[0]}" in PAGE.read_text(), row


WRITING: list[bool] = []  # whether --write-programs was given


def write_table() -> None:
    """Put the rows of this run into the page, in place of those of the same name."""
    page = PAGE.read_text()
    before, table, after = re.split(f"{BEGIN}|{END}", page)
    cells = [line.strip("|\n ").split(" | ") for line in table.splitlines()[2:]]
    rows = {(program, form): result for program, form, result in cells} | ROWS
    lines = ["| program | as | result |", "|---|---|---|"]
    lines += [f"| {program} | {form} | {rows[program, form]} |" for program, form in sorted(rows)]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)
