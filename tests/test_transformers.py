"""Hugging Face's Trainer with dmuon, against one process.

accelerate takes FSDP for GPUs only, and Trainer goes by it. `OnCPU` lifts that: while the accelerator is
built, the processes pass for those of GPUs.
"""

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dmuon.integrations.transformers import muon
from programs import (
    VOCABULARY,
    dedicated_names,
    difference,
    note,
    seeded,
    tokens_of,
    train_alone,
    whole_weights,
)

STEPS = 4


class Rows(Dataset):
    """Sequences whose tokens follow from their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = tokens_of(index, rows=1)[0]
        return {"input_ids": tokens, "labels": tokens}


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=14,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
        )
    )


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


class OnCPU(Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        if not self.args.fsdp:
            return super().create_accelerator_and_postprocess()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trainer_of(form: str, folder: str, model: nn.Module, **options: Any) -> Trainer:
    """What a user writes. form: "ddp", or the `state_dict_type` of FSDP."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    efficient = options.pop("efficient", False)
    if form != "ddp":
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": form,
            "cpu_ram_efficient_loading": efficient,
        }
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.1,
        adam_beta2=0.95,
        learning_rate=1e-3,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    return OnCPU(
        model=model,
        args=args,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        optimizer_cls_and_kwargs=(muon, {"lr": 0.02}),
    )


def falling(step: int, optimizer: Any) -> None:
    """Trainer's linear schedule."""
    factor = (STEPS - step - 1) / STEPS
    optimizer.lr = 0.02 * factor
    for group in optimizer.adamw.param_groups:
        group["lr"] = 1e-3 * factor


def processes() -> Any:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, world, world, "127.0.0.1", "29500")
    return mock.patch.dict(os.environ, dict(zip(names, values, strict=True)))


def trained(form: str, **options: Any) -> dict[str, Any]:
    with processes():
        return trained_inside(form, **options)


def trained_inside(form: str, **options: Any) -> dict[str, Any]:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    start = seeded(build=llama)
    model = seeded(1 if dist.get_rank() == 0 or not options.get("efficient") else 7, llama)
    trainer = trainer_of(form, folder[0], model, **options)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule) != (form == "ddp")
    weights = whole_weights(trainer.model)
    saved = None
    if form != "SHARDED_STATE_DICT":  # of which Trainer writes no model
        trainer.save_model(str(Path(folder[0]) / "model"))
        dist.barrier()
        saved = LlamaForCausalLM.from_pretrained(Path(folder[0]) / "model", dtype=torch.float32)
    rows = Rows()
    batches = [
        [
            torch.stack([rows[2 * b]["input_ids"], rows[2 * b + 1]["input_ids"]])
            for b in range(4 * s, 4 * s + 4)
        ]
        for s in range(STEPS)
    ]
    expected, norms = train_alone(
        start,
        dedicated_names(trainer.model),
        batches,
        loss=loss_of,
        max_norm=0.5,
        after_step=falling,
        spared=lambda name: "norm" in name,
        weight_decay=0.1,
        adamw_weight_decay=0.1,
    )
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]

    second = trainer_of(form, folder[0], seeded(9, llama), **options)
    second.train(resume_from_checkpoint=str(Path(folder[0]) / "checkpoint-2"))
    return {
        "trained": difference(weights, expected),
        "norms": max(abs(a - b) for a, b in zip(logged, norms, strict=True)),
        "saved": difference(dict(saved.named_parameters()), weights) if saved is not None else 0.0,
        "resumed": difference(whole_weights(second.model), weights),
    }


@pytest.mark.always("full", "ddp")
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("SHARDED_STATE_DICT", {}),
        ("FULL_STATE_DICT", {"gradient_checkpointing": True}),
        ("SHARDED_STATE_DICT", {"efficient": True}),
        ("ddp", {}),
    ],
    ids=["sharded", "full", "efficient", "ddp"],
)
def test_trainer(ranks, form, options):
    results = ranks(2, trained, form, timeout=150, **options)
    besides = "".join(f", {name}" for name in options).replace("efficient", "cpu_ram_efficient_loading")
    note("transformers", f"Trainer, {'DDP' if form == 'ddp' else 'FSDP2, ' + form}{besides}", results[0])
    for found in results:
        assert found["trained"] <= 1e-5, found
        assert found["norms"] <= 1e-4, found
        assert found["saved"] == 0.0, found
        assert found["resumed"] <= 1e-6, found


class AtStepTwo(TrainerCallback):
    """Keeps the weights, which an evaluation that likes early steps will find best."""

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 2:
            self.weights = whole_weights(rest["model"])


def best_at_the_end() -> dict[str, float]:
    """By form, the difference to the best weights."""
    found = {}
    with processes():
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        options = {"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "late"}
        for form in ("ddp", "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            place = str(Path(folder[0]) / form)
            trainer = trainer_of(form, place, seeded(build=llama), greater_is_better=False, **options)
            trainer.compute_metrics = lambda _, state=trainer.state: {"late": float(state.global_step)}
            trainer.add_callback(best := AtStepTwo())
            trainer.train()
            assert trainer.state.best_model_checkpoint == str(Path(place) / "checkpoint-2")
            found[form.removesuffix("_DICT")] = difference(whole_weights(trainer.model), best.weights)
            assert os.listdir(place) == ["checkpoint-2"]
    return found


def test_the_best_model_is_loaded_at_the_end(ranks):
    first, second = ranks(2, best_at_the_end, timeout=120)
    assert first == second
    note("transformers", "Trainer, load_best_model_at_end, save_strategy best", first)
    assert set(first.values()) == {0.0}


def trained_in_bfloat16() -> float:
    with processes():
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        ends = []
        for options in ({}, {"bf16": True}):
            trainer = trainer_of("SHARDED_STATE_DICT", folder[0], seeded(build=llama), **options)
            trainer.train()
            ends.append(whole_weights(trainer.model))
        assert all(weight.dtype == torch.float32 for weight in ends[1].values())
        return difference(*ends)


@pytest.mark.combination
def test_mixed_precision(ranks):
    found = ranks(2, trained_in_bfloat16, timeout=120)
    assert 0.0 < found[0] <= 0.05


def refused() -> None:
    with pytest.raises(RuntimeError, match="this muon is for Trainer"):
        muon()
    with processes():
        folder = tempfile.mkdtemp()
        trainer = trainer_of("SHARDED_STATE_DICT", folder, llama(), save_strategy="no")
        trainer.optimizer_cls_and_kwargs = (muon, {"lr": 0.02, "adamw_lr": 2e-3})
        with pytest.raises(
            ValueError, match=r"learning_rate = 0.001, the keywords of dmuon adamw_lr = 0.002"
        ):
            trainer.train()
        trainer.optimizer_cls_and_kwargs = (muon, {"lr": 0.02, "adamw_betas": (0.9, 0.99)})
        with pytest.raises(ValueError, match="adam_beta1 and adam_beta2"):
            trainer.train()
        trainer.is_distributed_loading_by_transformers = True  # as of models that come distributed
        with pytest.raises(ValueError, match=r"from_pretrained\(distributed_config=\.\.\.\)"):
            trainer.create_optimizer()


def test_what_is_refused(ranks):
    ranks(2, refused)
    why = "its matrices are cut before they can be dedicated; let Trainer wrap the model"
    note("transformers", "from_pretrained(distributed_config=...)", why)
    note("transformers", "TrainingArguments and keywords that differ", "give one of the two")
