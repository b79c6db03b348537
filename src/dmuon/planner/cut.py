"""How tensor parallelism cuts the parameters of a model: a plan by the layers' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .model import Model, Parameter, PlanError

_KINDS = ("rows", "columns", "replicate", "none")


@dataclass(frozen=True)
class Rule:
    """What happens to a layer.

    Attributes:
        kind: the weight is cut by "rows" (tensor dim 0) or "columns" (dim 1), is a replicated DTensor
            ("replicate"), or is left alone ("none").
        cuts_bias: the bias is cut as well: it has an element for each output, and these are cut.
    """

    kind: str
    cuts_bias: bool = False


_NOTHING = Rule("none")
_COLWISE = Rule("rows", cuts_bias=True)  # ColwiseParallel on a Linear: a weight is [outputs, inputs]
_ROWWISE = Rule("columns")
_NAMES = {  # by the last parts of a layer's name; the longest name that fits counts
    _COLWISE: """q_proj k_proj v_proj qkv_proj q_b_proj kv_b_proj gate_proj up_proj gate_up_proj w1 w3
        wq wk wv query key value fc1 linear1 intermediate.dense embed_tokens lm_head wte""",
    _ROWWISE: "o_proj out_proj down_proj w2 wo fc2 linear2 output.dense",
    Rule("columns", cuts_bias=True): "c_attn c_fc",  # GPT-2's weights are [inputs, outputs]
    Rule("rows"): "c_proj",
}
DEFAULT: Mapping[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}


def parse(text: str) -> dict[str, Rule]:
    """The default plan with changes: `mix_proj=rows,lm_head=none`. "none" alone starts from an empty plan.

    Raises:
        PlanError: for an entry that is not a name and a kind.
    """
    plan = dict(DEFAULT)
    for part in (part.strip() for part in text.split(",") if part.strip()):
        if part == "none":
            plan.clear()
            continue
        name, equals, kind = (piece.strip() for piece in part.partition("="))
        if not name or not equals or kind not in _KINDS:
            raise PlanError(f"--tp-plan: cannot read {part!r}; write LAYER=KIND, KIND of {', '.join(_KINDS)}")
        plan[name] = Rule(kind, cuts_bias=kind == "rows")
    return plan


def rule_of(name: str, plan: Mapping[str, Rule]) -> tuple[str | None, Rule]:
    """The plan's entry for a parameter, by the longest layer name that fits; (None, "none") if none."""
    best: str | None = None
    layer = name.rpartition(".")[0]
    start = len(layer)
    while start >= 0:
        start = layer.rfind(".", 0, start)
        if layer[start + 1 :] in plan:
            best = layer[start + 1 :]
    return (best, plan[best]) if best is not None else (None, _NOTHING)


def cut_dim(param: Parameter, plan: Mapping[str, Rule]) -> int | None:
    """The tensor dim that tensor parallelism cuts; None if none."""
    _, rule = rule_of(param.name, plan)
    if rule.kind not in ("rows", "columns"):
        return None
    if len(param.shape) == 2:
        return 0 if rule.kind == "rows" else 1
    return 0 if len(param.shape) == 1 and rule.cuts_bias and param.name.endswith("bias") else None


def is_replicated(param: Parameter, plan: Mapping[str, Rule]) -> bool:
    """Whether tensor parallelism has made the parameter a DTensor without cutting it."""
    _, rule = rule_of(param.name, plan)
    in_plan = rule.kind in ("rows", "columns", "replicate")
    return in_plan and cut_dim(param, plan) is None


def described(model: Model, plan: Mapping[str, Rule]) -> dict[str, str]:
    """The entries of the plan that apply to the model: layer name to kind."""
    used: dict[str, str] = {}
    for param in model.params:
        layer, rule = rule_of(param.name, plan)
        if layer is not None:
            used[layer] = rule.kind
    return used
