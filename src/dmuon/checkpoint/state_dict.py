"""torch's state dict functions by name, with names that no wrapper shows in, and nothing lost in silence.

The functions of `torch.distributed.checkpoint.state_dict` work on models with dedicated parameters as they
are, but for the model's `broadcast_from_rank0`. These take the same arguments, return the same, and add what
torch leaves out: wrappers' prefixes are taken out in every nesting, and states that do not fit are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from ..engine.agreement import gather_objects, ranks_of
from ..engine.runtime import find_runtime, has_runtime
from ..optim.variants import MOMENTUM
from ..selection import clean_name
from .hooks import OURS, check_entry, settings_to_save, warn_of_absent
from .sharded import evenly_sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.nn.modules.module import _IncompatibleKeys

    from ..optim.muon import Muon

StateDict = dict[str, Any]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """`torch.distributed.checkpoint.state_dict.get_model_state_dict`, without wrappers' prefixes.

    Collective over all ranks that share the model.

    Returns:
        The state by fully qualified name: DTensors as FSDP2 has them, or what `options` asks for.
    """
    from torch.distributed.checkpoint import state_dict

    state = state_dict.get_model_state_dict(model, submodules=submodules, options=options)
    if all(clean_name(name) == name for name in state):
        return state
    return {clean_name(name): value for name, value in state.items()}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, without wrappers' prefixes.

    Collective over all ranks that share the model.

    Returns:
        `{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}`, or a flat dict, if `options`
        asks for it. States and settings have the names that `torch.optim.Muon` and `AdamW` give them. Of an
        optimizer that never stepped, zeros and step 0 (torch's function leaves it at step 1).
    """
    from torch.distributed.checkpoint import state_dict

    optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    _start_states(optimizers)
    state = state_dict.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    return _rename(state, clean_name)


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """`torch.distributed.checkpoint.state_dict.set_model_state_dict`, for names without wrappers' prefixes.

    Collective over all ranks that share the model; with `broadcast_from_rank0`, over all ranks, and the first
    one's state counts.

    Returns:
        The names that are missing and those that are unexpected, with `strict=False`.

    Raises:
        RuntimeError: on all ranks, for missing and unexpected names, with `strict=True`.
    """
    from torch.distributed.checkpoint import state_dict

    options = options or state_dict.StateDictOptions()
    names = _torch_names(model)
    state = {clean_name(name): value for name, value in model_state_dict.items()}
    if options.strict:
        _raise_together(model, "model state", _difference(set(names), set(state)), options)
    state = {names.get(name, name): value for name, value in state.items()}
    if not (options.broadcast_from_rank0 and has_runtime(model)):
        return state_dict.set_model_state_dict(model, state, options=options)
    with evenly_sharded(find_runtime(model).params):
        return state_dict.set_model_state_dict(model, state, options=options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """`torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, for names without prefixes.

    It takes what `get_optimizer_state_dict` has made from `dmuon.Muon`, or from `torch.optim.Muon` and
    `torch.optim.AdamW` together. Collective as `set_model_state_dict`. With `strict=False`, parameters that
    the state leaves out start anew, and groups of which it has no parameter keep their settings.

    Raises:
        RuntimeError: on all ranks, for missing and unexpected names (with `strict=True`), and for parameter
            groups that are cut otherwise than the optimizers'.
        ValueError: on all ranks, for states that lack a part, or are of another algorithm or shape; for such
            settings.
    """
    from torch.distributed.checkpoint import state_dict

    options = options or state_dict.StateDictOptions()
    optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    # A flat state is known by its keys; asked for here, torch would compare it with a flat one of its own.
    options = dataclasses.replace(options, flatten_optimizer_state_dict=False)
    elsewhere = options.broadcast_from_rank0 and dist.get_rank() > 0
    state = {} if elsewhere else dict(optim_state_dict)
    left_out: list[str] = []
    groups: list[_Group] = []
    if not _is_numbered(state):
        state = _rename(state, clean_name)
        groups, aliases = _groups(model, optimizers)
        entries = _entries(state, aliases)
        problem = _misfit(groups, aliases, state, options.strict) or _wrong_entry(groups, entries)
        _raise_together(model, "optimizer state", problem, options)
        left_out = [name for group in groups for name, t in group.trainable.items() if t]
        left_out = [name for name in left_out if name not in entries]
        if not options.strict and "state" in state:
            state["param_groups"] += [group.as_loaded() for group in groups if group.is_absent(state)]
        names = _torch_names(model)
        state = _rename(state, lambda name: names.get(name, name), names.keys())
    _start_states(optimizers)
    state_dict.set_optimizer_state_dict(model, optimizers, state, options=options)
    if options.full_state_dict and not options.strict:  # there torch keeps what was before
        if options.broadcast_from_rank0:
            answer = [left_out]
            dist.broadcast_object_list(answer, src=0)
            left_out = answer[0]
        for group in groups:
            group.start_anew(left_out)


def to_torch_state_dict(optimizer_state_dict: Mapping[str, Any]) -> StateDict:
    """An optimizer state without what `torch.optim.Muon` and `torch.optim.AdamW` do not have.

    Two uses: to write a checkpoint that is theirs in all, and, as `torch.distributed.checkpoint.load` reads
    what it is shown, to read one of theirs. (They read dmuon's checkpoints as they are.)

    Args:
        optimizer_state_dict: of `get_optimizer_state_dict`, or of `dmuon.Muon.state_dict`; not flat.

    Returns:
        The same state; of the settings, `ns_dtype`, `ns_algorithm` and the like are left out, which say how
        dmuon computes the update.

    Raises:
        ValueError: for a variant's state, and for settings that `torch.optim.Muon` cannot follow: `maximize`,
            `cautious_weight_decay`, the spectral scale, and Newton-Schulz coefficients that differ from step
            to step.
    """
    groups = []
    foreign = {name for entry in optimizer_state_dict["state"].values() for name in entry}
    foreign -= {MOMENTUM, "step", "exp_avg", "exp_avg_sq"}
    if foreign:
        raise ValueError(f"torch.optim.Muon keeps no {sorted(foreign)}: it knows no variants")
    for group in optimizer_state_dict["param_groups"]:
        algorithm = group.get("algorithm", "adamw")
        coefficients = group.get("ns_coefficients", (0.0,))
        if algorithm == "muon" and group["maximize"]:
            raise ValueError("torch.optim.Muon cannot maximize")
        if algorithm == "muon" and (group["cautious_weight_decay"] or group["adjust_lr_fn"] == "spectral"):
            raise ValueError("torch.optim.Muon knows no cautious_weight_decay and no spectral scale")
        if isinstance(coefficients, str) or not isinstance(coefficients[0], float):
            raise ValueError(
                f"torch.optim.Muon takes the same three ns_coefficients for every step, not {coefficients!r}"
            )
        groups.append({key: value for key, value in group.items() if key not in OURS[algorithm]})
    return {**optimizer_state_dict, "param_groups": groups}


# Names


def _is_numbered(state: Mapping[str, Any]) -> bool:
    """Whether it is what `optimizer.state_dict()` itself returns, where parameters are numbers."""
    params = [name for group in state.get("param_groups", ()) for name in group["params"]]
    return bool(params) and all(isinstance(name, int) for name in params)


def _rename(
    state: Mapping[str, Any], rename: Callable[[str], str], known: AbstractSet[str] = frozenset()
) -> StateDict:
    """An optimizer state with other names for the parameters; containers are copied, values are not.

    known: names that may be in the keys of a flat state. Without them, `rename` gets the whole keys.
    """
    if state and "state" not in state:
        split = [(*_split(key, known), value) for key, value in state.items()]
        return {f"{before}{rename(name)}{behind}": value for before, name, behind, value in split}
    return {
        **state,
        "state": {rename(name): values for name, values in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [rename(name) for name in group["params"]]}
            for group in state.get("param_groups", ())
        ],
    }


def _split(key: str, known: AbstractSet[str]) -> tuple[str, str, str]:
    """A key of a flat state, "state.NAME.KEY" or "param_groups.NAME.KEY", before, in and behind the name."""
    kind, _, rest = key.partition(".")
    parts = rest.split(".")
    for end in range(1, len(parts)):
        if (name := ".".join(parts[:end])) in known:
            return f"{kind}.", name, rest[len(name) :]
    return "", key, ""


def _torch_names(model: nn.Module) -> dict[str, str]:
    """What torch's functions call each entry of the model's state, by clean name.

    They leave the compiler's prefix in where a checkpoint wrapper is around a compiled module.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns

    names = {}
    for path, module in model.named_modules(remove_duplicate=False):
        entries = [k for k, v in (*module._parameters.items(), *module._buffers.items()) if v is not None]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            entries.append("_extra_state")
        for entry in entries:
            if entry not in module._non_persistent_buffers_set:
                for name in _get_fqns(model, f"{path}.{entry}" if path else entry):
                    names[clean_name(name)] = name
    return names


def _start_states(optimizers: Iterable[Optimizer]) -> None:
    """Give those of ours that never stepped a state, as torch would by a step that counts."""
    for optimizer in optimizers:
        if hasattr(optimizer, "start_state") and not optimizer.state:
            optimizer.start_state()


# What does not fit


@dataclasses.dataclass
class _Group:
    """A parameter group: its settings, and its parameters by name."""

    optimizer: Optimizer
    settings: dict[str, Any]
    params: dict[str, torch.Tensor]

    @property
    def trainable(self) -> dict[str, bool]:
        """Whether each parameter is."""
        return {name: param.requires_grad for name, param in self.params.items()}

    def start_anew(self, names: Iterable[str]) -> None:
        """Forget the state of those parameters that are in `names`, if the optimizer is ours."""
        for name in set(self.params).intersection(names) if "algorithm" in self.settings else ():
            warn_of_absent(name)
            self.optimizer.state.pop(self.params[name], None)

    def is_absent(self, state: StateDict) -> bool:
        """Whether no group of the state lists any of the parameters."""
        listed = {name for group in state["param_groups"] for name in group["params"]}
        return bool(self.trainable) and not listed.intersection(self.trainable)

    def as_loaded(self) -> dict[str, Any]:
        """The group as a state would hold it."""
        return {**settings_to_save(self.settings), "params": list(self.trainable)}


def _groups(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[list[_Group], dict[str, str]]:
    """All groups of the optimizers, and by which name they know each name of a tied parameter."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    first: dict[nn.Parameter, str] = {}
    aliases = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        for name in map(clean_name, _get_fqns(model, path)):
            aliases[name] = first.setdefault(param, name)
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            params = {first[p]: p for p in group["params"] if p in first}
            groups.append(_Group(optimizer, settings, params))
    return groups, aliases


def _entries(state: StateDict, aliases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The states of parameters, by name and key; of a flat state, too."""
    if not state or "state" in state:
        return {aliases.get(name, name): entry for name, entry in state.get("state", {}).items()}
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        before, name, behind = _split(key, aliases.keys())
        if before == "state.":
            found.setdefault(aliases[name], {})[behind.removeprefix(".")] = value
    return found


def _wrong_entry(groups: list[_Group], entries: Mapping[str, dict[str, Any]]) -> ValueError | None:
    """What is wrong with the state of one parameter of ours; torch fills in what a full state lacks."""
    for group in groups:
        for name, param in group.params.items():
            if name in entries and "algorithm" in group.settings:
                try:
                    algorithm = group.settings["algorithm"]
                    check_entry(entries[name], name, param, algorithm, cast("Muon", group.optimizer))
                except ValueError as error:
                    return error
    return None


def _misfit(groups: list[_Group], aliases: dict[str, str], state: StateDict, strict: bool) -> str | None:
    """What is wrong with a state for these groups, in words, as far as names tell."""
    if state and "state" not in state:
        named = [(key, aliases.get(_split(key, aliases.keys())[1])) for key in state]
        found = {name for key, name in named if name is not None and key.startswith("state.")}
        strangers = {key for key, name in named if name is None}
        loaded = [{name} for name in found]
    else:
        found = {aliases.get(name, name) for name in state.get("state", {})}
        strangers = found - set(aliases.values())
        loaded = [{aliases.get(n, n) for n in group["params"]} for group in state["param_groups"]]
    every = {name for group in groups for name in group.trainable}
    needed = {name for group in groups for name, trainable in group.trainable.items() if trainable}
    if strict:
        difference = _difference(needed, (found & needed) | (found - every) | strangers)
        unlisted = sorted(every - set().union(*loaded)) if "state" in state else []
        if difference is None and unlisted:
            difference = f"its param_groups do not list {', '.join(unlisted)}"
        if difference is not None:
            return difference
    return _other_groups(groups, loaded) if "state" in state else None


def _other_groups(groups: list[_Group], loaded: list[set[str]]) -> str | None:
    """Groups that would lose their settings, since the state's are cut otherwise."""
    for mine in groups:
        theirs = [group for group in loaded if group.intersection(mine.trainable)]
        if len(theirs) > 1:
            one, other = (min(group.intersection(mine.trainable)) for group in theirs[:2])
            return f"it has {one} and {other} in different parameter groups, this optimizer in one"
    for names in loaded:
        ours = [group for group in groups if names.intersection(group.trainable)]
        if len(ours) > 1:
            one, other = (min(names.intersection(group.trainable)) for group in ours[:2])
            return f"it has {one} and {other} in one parameter group, this optimizer in two"
    return None


def _difference(expected: AbstractSet[str], given: AbstractSet[str]) -> str | None:
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if not missing and not unexpected:
        return None
    parts = [f"missing are {', '.join(missing)}"] if missing else []
    parts += [f"unexpected are {', '.join(unexpected)}"] if unexpected else []
    return "; ".join(parts)


def _raise_together(
    model: nn.Module, what: str, problem: str | Exception | None, options: StateDictOptions
) -> None:
    """Raise on all ranks what one has found: those that went on would wait for it.

    Only a full state can be another one on each rank.
    """
    if options.broadcast_from_rank0:
        answer = [problem]
        dist.broadcast_object_list(answer, src=0)
        problem = answer[0]
    elif options.full_state_dict and has_runtime(model):
        answers = gather_objects(ranks_of(find_runtime(model).params), problem)
        problem = next((answer for answer in answers if answer is not None), None)
    if isinstance(problem, Exception):
        raise problem
    if problem is not None:
        raise RuntimeError(f"the {what} to load does not fit: {problem}")
