"""The parameters of published architectures, by Hugging Face's `config.json`.

Names and order are those of the `transformers` models; the experts of a layer are a matrix each, as there in
a `ModuleList`. Each function yields (name, shape) of all parameters, a tied one once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .model import Model, PlanError, from_names

Config = Mapping[str, Any]
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
Named = tuple[str, tuple[int, ...]]


def from_config(name: str, config: Config) -> Model:
    """The model that a config describes.

    Raises:
        PlanError: for a `model_type` that is not known, or an entry that is missing or no number.
    """
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise PlanError(
            f"{name}: the model_type {kind!r} is not known; known are {', '.join(sorted(ARCHITECTURES))}. "
            "Give safetensors files, or a module:function that builds the model"
        )
    try:
        model = from_names(name, ARCHITECTURES[kind](config))
        experts = next((config[key] for key in _COUNTS if config.get(key)), 0)
        active = config.get("num_experts_per_tok")
        return replace(model, active=active / experts) if experts and active else model
    except KeyError as error:
        raise PlanError(f"{name}: the config of a {kind} model has no entry {error}") from error
    except (TypeError, ArithmeticError) as error:
        raise PlanError(f"{name}: the config has an entry of a wrong kind: {error}") from error


def _linear(name: str, outputs: int, inputs: int, bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


# Decoders with rotary positions: Llama and its kin


def _decoder(
    c: Config,
    attention: Callable[[Config, str], Iterator[Named]],
    mlp: Callable[[Config, str, int], Iterator[Named]],
) -> Iterator[Named]:
    """mlp: of a config, a name and the number of the layer."""
    width = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], width)
    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield from attention(c, f"{name}.self_attn")
        yield from mlp(c, name, layer)
        yield from _norm(f"{name}.input_layernorm", width)
        yield from _norm(f"{name}.post_attention_layernorm", width)
    yield from _norm("model.norm", width)
    if not c.get("tie_word_embeddings", False):
        yield from _linear("lm_head", c["vocab_size"], width)


def _grouped_attention(c: Config, name: str) -> Iterator[Named]:
    """Fewer heads for keys and values than for queries. Qwen 2 has biases there, Qwen 3 norms of heads."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim") or width // heads
    shared = c.get("num_key_value_heads") or heads
    everywhere = c.get("attention_bias", False)
    bias = everywhere or c["model_type"] == "qwen2"
    yield from _linear(f"{name}.q_proj", heads * head, width, bias)
    yield from _linear(f"{name}.k_proj", shared * head, width, bias)
    yield from _linear(f"{name}.v_proj", shared * head, width, bias)
    yield from _linear(f"{name}.o_proj", width, heads * head, everywhere)
    if c["model_type"].startswith("qwen3"):
        yield from _norm(f"{name}.q_norm", head)
        yield from _norm(f"{name}.k_norm", head)


def _latent_attention(c: Config, name: str) -> Iterator[Named]:
    """DeepSeek's: queries, keys and values through narrow latent vectors (DeepSeek-V2, arXiv:2405.04434)."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    plain, rotary, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    query = heads * (plain + rotary)
    if c.get("q_lora_rank") is None:
        yield from _linear(f"{name}.q_proj", query, width)
    else:
        yield from _linear(f"{name}.q_a_proj", c["q_lora_rank"], width)
        yield from _norm(f"{name}.q_a_layernorm", c["q_lora_rank"])
        yield from _linear(f"{name}.q_b_proj", query, c["q_lora_rank"])
    yield from _linear(f"{name}.kv_a_proj_with_mqa", c["kv_lora_rank"] + rotary, width)
    yield from _norm(f"{name}.kv_a_layernorm", c["kv_lora_rank"])
    yield from _linear(f"{name}.kv_b_proj", heads * (plain + value), c["kv_lora_rank"])
    yield from _linear(f"{name}.o_proj", width, heads * value)


def _gated(name: str, width: int, hidden: int, bias: bool = False) -> Iterator[Named]:
    yield from _linear(f"{name}.gate_proj", hidden, width, bias)
    yield from _linear(f"{name}.up_proj", hidden, width, bias)
    yield from _linear(f"{name}.down_proj", width, hidden, bias)


def _dense_mlp(c: Config, name: str, layer: int) -> Iterator[Named]:
    yield from _gated(f"{name}.mlp", c["hidden_size"], c["intermediate_size"], c.get("mlp_bias", False))


def _mixtral_mlp(c: Config, name: str, layer: int) -> Iterator[Named]:
    width, hidden = c["hidden_size"], c["intermediate_size"]
    name = f"{name}.block_sparse_moe"
    yield from _linear(f"{name}.gate", c["num_local_experts"], width)
    for expert in range(c["num_local_experts"]):
        yield from _linear(f"{name}.experts.{expert}.w1", hidden, width)
        yield from _linear(f"{name}.experts.{expert}.w2", width, hidden)
        yield from _linear(f"{name}.experts.{expert}.w3", hidden, width)


def _qwen_moe_mlp(c: Config, name: str, layer: int) -> Iterator[Named]:
    sparse = (layer + 1) % c.get("decoder_sparse_step", 1) == 0 and layer not in c.get("mlp_only_layers", [])
    if not sparse:
        yield from _dense_mlp(c, name, layer)
        return
    yield from _linear(f"{name}.mlp.gate", c["num_experts"], c["hidden_size"])
    for expert in range(c["num_experts"]):
        yield from _gated(f"{name}.mlp.experts.{expert}", c["hidden_size"], c["moe_intermediate_size"])


def _deepseek_mlp(c: Config, name: str, layer: int) -> Iterator[Named]:
    """The first layers are dense. The correction of the router's scores is a buffer."""
    width, hidden = c["hidden_size"], c["moe_intermediate_size"]
    if layer < c["first_k_dense_replace"]:
        yield from _dense_mlp(c, name, layer)
        return
    for expert in range(c["n_routed_experts"]):
        yield from _gated(f"{name}.mlp.experts.{expert}", width, hidden)
    yield from _linear(f"{name}.mlp.gate", c["n_routed_experts"], width)
    if c.get("n_shared_experts"):
        yield from _gated(f"{name}.mlp.shared_experts", width, hidden * c["n_shared_experts"])


def _llama(c: Config) -> Iterator[Named]:
    return _decoder(c, _grouped_attention, _dense_mlp)


def _mixtral(c: Config) -> Iterator[Named]:
    return _decoder(c, _grouped_attention, _mixtral_mlp)


def _qwen_moe(c: Config) -> Iterator[Named]:
    return _decoder(c, _grouped_attention, _qwen_moe_mlp)


def _deepseek(c: Config) -> Iterator[Named]:
    return _decoder(c, _latent_attention, _deepseek_mlp)


# Others


def _gpt2(c: Config) -> Iterator[Named]:
    """Weights are [inputs, outputs] here. The head is tied to the embedding."""
    width = c["n_embd"]
    hidden = c.get("n_inner") or 4 * width

    def layer(name: str, inputs: int, outputs: int) -> Iterator[Named]:
        yield f"{name}.weight", (inputs, outputs)
        yield f"{name}.bias", (outputs,)

    yield "transformer.wte.weight", (c["vocab_size"], width)
    yield "transformer.wpe.weight", (c["n_positions"], width)
    for number in range(c["n_layer"]):
        name = f"transformer.h.{number}"
        yield from _norm(f"{name}.ln_1", width, bias=True)
        yield from layer(f"{name}.attn.c_attn", width, 3 * width)
        yield from layer(f"{name}.attn.c_proj", width, width)
        yield from _norm(f"{name}.ln_2", width, bias=True)
        yield from layer(f"{name}.mlp.c_fc", width, hidden)
        yield from layer(f"{name}.mlp.c_proj", hidden, width)
    yield from _norm("transformer.ln_f", width, bias=True)
    if not c.get("tie_word_embeddings", True):
        yield from _linear("lm_head", c["vocab_size"], width)


def _vit(c: Config) -> Iterator[Named]:
    """For classification, without a pooler."""
    width, hidden = c["hidden_size"], c["intermediate_size"]
    side, channels = c["patch_size"], c.get("num_channels", 3)
    patches = (c["image_size"] // side) ** 2
    bias = c.get("qkv_bias", True)
    yield "vit.embeddings.cls_token", (1, 1, width)
    yield "vit.embeddings.position_embeddings", (1, patches + 1, width)
    yield "vit.embeddings.patch_embeddings.projection.weight", (width, channels, side, side)
    yield "vit.embeddings.patch_embeddings.projection.bias", (width,)
    for layer in range(c["num_hidden_layers"]):
        name = f"vit.encoder.layer.{layer}"
        for kind in ("query", "key", "value"):
            yield from _linear(f"{name}.attention.attention.{kind}", width, width, bias)
        yield from _linear(f"{name}.attention.output.dense", width, width, bias=True)
        yield from _linear(f"{name}.intermediate.dense", hidden, width, bias=True)
        yield from _linear(f"{name}.output.dense", width, hidden, bias=True)
        yield from _norm(f"{name}.layernorm_before", width, bias=True)
        yield from _norm(f"{name}.layernorm_after", width, bias=True)
    yield from _norm("vit.layernorm", width, bias=True)
    yield from _linear("classifier", c.get("num_labels", 1000), width, bias=True)


ARCHITECTURES: Mapping[str, Callable[[Config], Iterator[Named]]] = {
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen_moe,
    "vit": _vit,
}
