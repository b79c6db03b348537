"""dmuon for the Trainer of Hugging Face transformers.

Trainer(..., optimizer_cls_and_kwargs=(muon, dict(lr=0.02, adamw_lr=1e-3)))
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn as nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..engine import fsdp
from ..engine.runtime import find_runtime
from ..optim.muon import Muon
from ..selection import clean_name
from . import accelerate

# What TrainingArguments say of AdamW, and what `Muon` calls it.
_ADAMW = {
    "adamw_lr": ("learning_rate",),
    "adamw_betas": ("adam_beta1", "adam_beta2"),
    "adamw_eps": ("adam_epsilon",),
    "adamw_weight_decay": ("weight_decay",),
}


def muon() -> Callable[..., Muon]:
    """What Trainer calls to make its optimizer, with the model that is not wrapped yet.

    Of TrainingArguments, `learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay` are
    AdamW's here (`weight_decay` also Muon's), as far as `optimizer_cls_and_kwargs` does not say otherwise. As
    Trainer does, weight decay leaves out norms and biases. The rest of the keywords go to `dmuon.Muon`, and
    `predicate` to `dmuon.dedicate_params`.

    Under DDP, where Trainer asks one rank alone for the optimizer's state, it is brought there before.

    Returns:
        A function of the model and of these keywords.

    Raises:
        RuntimeError: if it is not Trainer that calls.
        ValueError: for a setting that TrainingArguments and the keywords give differently; and what
            `dmuon.integrations.accelerate.muon` refuses.
    """
    # Trainer hands over the model alone: what the user has set is on the caller.
    frame = inspect.currentframe()
    caller = frame.f_back.f_locals.get("self") if frame is not None and frame.f_back is not None else None
    if not isinstance(caller, Trainer):
        raise RuntimeError(
            "this muon is for Trainer(optimizer_cls_and_kwargs=(muon, dict(...))); elsewhere take "
            "dmuon.integrations.accelerate.muon or dmuon.Muon"
        )
    trainer = caller

    def build(model: nn.Module, **settings: Any) -> Muon:
        if trainer.is_distributed_loading_by_transformers:
            raise ValueError(
                "the model was distributed by from_pretrained(distributed_config=...), which has cut its "
                "matrices already: load it whole and let Trainer (accelerate's FSDP2) wrap it"
            )
        settings = _with_arguments(trainer, model, settings)
        optimizer = accelerate.muon(model, **settings)
        if find_runtime(model).layout.is_ddp:
            trainer.add_callback(_ConsolidateBeforeSaving(optimizer))
        else:
            trainer.add_callback(_FindTheBest(model))
        return optimizer

    return build


def _with_arguments(trainer: Trainer, model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with what TrainingArguments say besides."""
    args, settings = trainer.args, dict(settings)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for ours, theirs in _ADAMW.items():
        value = tuple(getattr(args, name) for name in theirs)
        is_default = value == tuple(defaults[name] for name in theirs)
        value = value if len(value) > 1 else value[0]
        given = settings.setdefault(ours, value)
        if given != value and not is_default:
            raise ValueError(
                f"TrainingArguments have {' and '.join(theirs)} = {value}, the keywords of dmuon "
                f"{ours} = {given}: give one of the two"
            )
    settings.setdefault("weight_decay", args.weight_decay)
    if settings["adamw_weight_decay"] and "param_groups" not in settings:
        decayed = set(trainer.get_decay_parameter_names(model))
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        spared = [clean_name(name) for name in names if name not in decayed]
        if spared:
            settings["param_groups"] = [{"params": spared, "weight_decay": 0.0}]
    return settings


class _ConsolidateBeforeSaving(TrainerCallback):
    """Brings the optimizer's state to the rank that will save it, on all ranks."""

    def __init__(self, optimizer: Muon) -> None:
        self._optimizer = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """After the callbacks of Trainer that decide whether to save."""
        if control.should_save and not args.save_only_model:
            self._optimizer.consolidate_state_dict()

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Where the evaluation decides whether to save."""
        if args.save_strategy == SaveStrategy.BEST and not args.save_only_model:
            self._optimizer.consolidate_state_dict()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """As `on_step_end`."""
        self.on_step_end(args, state, control)


class _FindTheBest(TrainerCallback):
    """Lets `load_best_model_at_end` work under FSDP2, which it does not by itself, with any optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """accelerate cannot load into a model that an evaluation has left gathered."""
        fsdp.reshard(self._model)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Trainer looks for the best one while its shards are written: some ranks see it, others do not."""
        if state.best_global_step and not state.is_hyper_param_search:  # which has folders of its own
            best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            state.best_model_checkpoint = str(best)
