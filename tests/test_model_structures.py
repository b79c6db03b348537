"""Models of transformers: what their parameters hold is recognised, and trained matrix by matrix."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.selection import block_modules
from reference import orthogonalize

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without(*names: str) -> dict:
    return {key: value for key, value in SIZES.items() if key not in names}


def make(kind: str) -> nn.Module:
    t = transformers
    torch.manual_seed(0)
    if kind == "gpt2":
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        return t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32, **ids)
        )
    if kind == "gpt_neox":
        return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**without("num_key_value_heads", "head_dim")))
    if kind == "falcon":
        sizes = without("intermediate_size", "num_key_value_heads", "head_dim")
        return t.FalconForCausalLM(t.FalconConfig(num_kv_heads=2, new_decoder_architecture=True, **sizes))
    if kind == "phi3":
        return t.Phi3ForCausalLM(t.Phi3Config(**without("head_dim")))
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=3, **SIZES))
    if kind == "qwen3_moe":
        sizes = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes, **SIZES))
    if kind == "gpt_oss":
        layers = ["full_attention"] * 2
        return t.GptOssForCausalLM(
            t.GptOssConfig(num_local_experts=3, num_experts_per_tok=2, layer_types=layers, **SIZES)
        )
    assert kind == "deepseek_v3"
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 2,
    }
    heads = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    }
    sizes = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    config = t.DeepseekV3Config(**experts, **heads, **sizes, **without("head_dim", "num_key_value_heads"))
    return t.DeepseekV3ForCausalLM(config)


def matrices(kind: str, name: str, w: torch.Tensor) -> list[torch.Tensor]:
    """The matrices [out, in] of a parameter of Muon's, as its forward uses them; none of one of AdamW's."""
    if w.ndim < 2 or any(word in name for word in ("embed", "wte", "wpe", "lm_head", "bias", "router")):
        return []
    if ".mlp.gate.weight" in name:  # a router
        return []
    if ".experts." in name:
        found = []
        for expert in w:
            expert = expert.T if kind == "gpt_oss" else expert
            if "gate_up" not in name:
                found.append(expert)
            elif kind == "gpt_oss":
                found += [expert[::2], expert[1::2]]
            else:
                found += [*expert.chunk(2)]
        return found
    if kind == "gpt2":
        return list(w.T.chunk(3)) if "c_attn" in name else [w.T]
    if "query_key_value" in name:  # 4 heads of 4, each q, k, v; Falcon: 2 groups of q, q, k, v
        grouped = w.view(2, 4, 4, 16) if kind == "falcon" else w.view(4, 3, 4, 16)
        return [grouped[:, :-2], grouped[:, -2], grouped[:, -1]]
    if "qkv_proj" in name:
        return list(w.split((16, 8, 8)))
    return list(w.chunk(2)) if "gate_up_proj" in name else [w]


class Oracle:
    """One process; momentum as a whole, Newton-Schulz for each matrix."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.kind = kind
        named = dict(model.named_parameters())
        self.muon = {name: p for name, p in named.items() if matrices(kind, name, p)}
        rest = [p for name, p in named.items() if name not in self.muon]
        self.adamw = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.momenta = {name: torch.zeros_like(p) for name, p in self.muon.items()}

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.muon.items():
            momentum = self.momenta[name].lerp_(p.grad, 0.05)
            direction = torch.lerp(p.grad, momentum, 0.95)
            parts = (matrices(self.kind, name, t) for t in (p.data, direction))
            for weight, part in zip(*parts, strict=True):
                matrix = part.reshape(-1, part.shape[-1])
                scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                weight.sub_(orthogonalize(matrix).view(part.shape), alpha=0.02 * scale)
        self.adamw.step()


KINDS = ["gpt2", "gpt_neox", "falcon", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def train(kinds: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for kind in kinds:
        model = make(kind).eval()  # without dropout
        plain = copy.deepcopy(model)
        oracle = Oracle(kind, plain)
        dmuon.dedicate_params(model, mesh)
        for block in block_modules(model).values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = dmuon.Muon(model)
        muons = {
            n
            for g in optimizer.param_groups
            if g["algorithm"] == "muon"
            for n in names_of(model, g["params"])
        }
        assert muons == set(oracle.muon), kind
        for step in range(3):
            tokens = [
                torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(2 * step + r))
                for r in (0, 1)
            ]
            mine = tokens[dist.get_rank()]
            model(input_ids=mine, labels=mine).loss.backward()
            for each in tokens:
                (plain(input_ids=each, labels=each).loss / 2).backward()
            optimizer.step()
            oracle.step()
            optimizer.zero_grad()
            plain.zero_grad()
        for name, weight in plain.named_parameters():
            whole = dmuon.full_tensor(model.get_parameter(name)).detach()
            assert (whole - weight).abs().max() < 1e-5, f"{kind}: {name}"


def names_of(model: nn.Module, params: list) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in params]


def test_three_steps_equal_one_process_matrix_by_matrix(ranks):
    ranks(2, train, KINDS)


def clip_latent_attention() -> None:
    """Each head's logits come out times its factor, on the same tokens; values stay as they are."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = make("deepseek_v3").eval()
    model.set_attn_implementation("eager")
    dmuon.dedicate_params(model, mesh)
    for block in block_modules(model).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.1)
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, seen = modeling.eager_attention_forward, []

    def attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(q @ k.mT * options["scaling"])
        return plain(module, q, k, *rest, **options)

    def logits() -> list[torch.Tensor]:
        """[batch, heads, queries, keys] of each layer."""
        seen.clear()
        with torch.no_grad(), mock.patch.object(modeling, "eager_attention_forward", attention):
            model(input_ids=tokens)
        return seen[:]

    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    sizes = {"heads": 4, "nope": 4, "rope": 4, "value": 4}
    for index in (1, 0):  # the last first: a layer's input depends on those before it
        at = f"model.layers.{index}.self_attn"
        before, values = logits()[index], full_values(model, at)
        largest = before.amax((0, 2, 3))
        heads = dmuon.AttentionHeads.latent(
            largest, f"{at}.q_b_proj.weight", f"{at}.kv_b_proj.weight", **sizes
        )
        every = dmuon.qk_clip_(model, [heads], threshold=float("inf"))[0]
        threshold = every.median().item()
        dmuon.qk_clip_(model, [heads], threshold=threshold)
        gamma = (threshold / every).clamp(max=1)
        assert 0 < (gamma < 1).sum() < 4
        torch.testing.assert_close(logits()[index], before * gamma[:, None, None])
        assert torch.equal(full_values(model, at), values)


def full_values(model: nn.Module, attention: str) -> torch.Tensor:
    whole = dmuon.full_tensor(model.get_parameter(f"{attention}.kv_b_proj.weight")).detach()
    return whole.view(4, 8, -1)[:, 4:]


def test_logits_of_latent_attention_are_clipped(ranks):
    ranks(2, clip_latent_attention)
