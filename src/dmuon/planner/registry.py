"""Public models by name: the entries of their published configs that determine the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .architectures import from_config
from .model import Model, PlanError


def _gpt2(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
    }


def _decoder(
    model_type: str,
    vocabulary: int,
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    shared: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        **more,
    }


def _latent(experts: int, dense: int) -> dict[str, Any]:
    return {
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


_QWEN3_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _gpt2(768, 12),
    "gpt2-xl": _gpt2(1600, 48),
    "llama-3-8b": _decoder("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": _decoder("llama", 128256, 8192, 28672, 80, 64, 8),
    "llama-3-405b": _decoder("llama", 128256, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _decoder("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True),
    "qwen2.5-7b": _decoder("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-72b": _decoder("qwen2", 152064, 8192, 29568, 80, 64, 8),
    "qwen3-30b-a3b": _decoder("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, **_QWEN3_EXPERTS),
    "mixtral-8x7b": _decoder(
        "mixtral", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _decoder(
        "mixtral", 32000, 6144, 16384, 56, 48, 8, num_local_experts=8, num_experts_per_tok=2
    ),
    "deepseek-v3": _decoder("deepseek_v3", 129280, 7168, 18432, 61, 128, 128, **_latent(256, 3)),
    "kimi-k2": _decoder("kimi_k2", 163840, 7168, 18432, 61, 64, 64, **_latent(384, 1)),
    "vit-h-14": {
        "model_type": "vit",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "image_size": 224,
        "patch_size": 14,
    },
}


def from_registry(name: str) -> Model:
    """A public model.

    Raises:
        PlanError: for a name that is not in the registry; it lists those that are.
    """
    if name not in CONFIGS:
        raise PlanError(
            f"unknown model {name!r}. Known are {', '.join(CONFIGS)}; or give a module:function that returns "
            "a model, or a config.json, a safetensors file or a directory with either"
        )
    return from_config(name, CONFIGS[name])
