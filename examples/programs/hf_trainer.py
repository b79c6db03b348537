"""Hugging Face's Trainer with dmuon: FSDP2 on GPUs, DDP on CPUs (accelerate has no FSDP there).

torchrun --nproc-per-node 2 examples/programs/hf_trainer.py
"""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dmuon.integrations.transformers import muon


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
    )
    fsdp: dict[str, Any] = {
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    }
    on_gpus = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not on_gpus,
        max_steps=20,
        per_device_train_batch_size=8,
        logging_steps=5,
        learning_rate=1e-3,  # AdamW's
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **({"fsdp": True, **fsdp} if on_gpus else {}),
    )
    tokens = torch.randint(0, 256, (640, 33)).cumsum(1) % 256
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        model=model, args=args, train_dataset=data, optimizer_cls_and_kwargs=(muon, {"lr": 0.02})
    )
    trainer.train()


if __name__ == "__main__":
    main()
