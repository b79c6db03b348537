"""A compact GPT: rotary positions, RMSNorm, SwiGLU, an untied output head.

Shapes in the comments: B sequences, T tokens, D model width, H heads, K = D / H head width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model."""

    vocab_size: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    seq_len: int = 128  # the longest sequence the rotary tables cover

    @property
    def hidden(self) -> int:
        """Width of the SwiGLU layer: 8/3 of the model width, rounded up to a multiple of 32."""
        return math.ceil(self.width * 8 / 3 / 32) * 32


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv:2104.09864), halves convention, base 10000."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_width: int, seq_len: int) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {head_width}")
        # Not persistent: the tables follow from the sizes, so a checkpoint has no use for them.
        self.register_buffer("cos", torch.empty(seq_len, head_width // 2), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, head_width // 2), persistent=False)

    def init_tables(self) -> None:
        seq_len, half = self.cos.shape
        position = torch.arange(seq_len, device=self.cos.device, dtype=torch.float32)
        frequency = 10000.0 ** (-torch.arange(half, device=self.cos.device, dtype=torch.float32) / half)
        angle = torch.outer(position, frequency)  # T, K/2
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B, H, T, K
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        left, right = x.chunk(2, dim=-1)  # B, H, T, K/2 each
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of {config.heads} heads")
        self.head_width = config.width // config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(self.head_width, config.seq_len)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B, T, D
        def split_heads(y: torch.Tensor) -> torch.Tensor:
            # By their width: under tensor parallelism a rank has only some of the heads.
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # B, H, T, K

        q = self.rotary(split_heads(self.q_proj(x)))
        k = self.rotary(split_heads(self.k_proj(x)))
        v = split_heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # B, T, D


class SwiGLU(nn.Module):
    """The gated feed-forward layer (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B, T, D
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer, normalised before each of its two parts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B, T, D
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token ids in, next-token logits out. Can be built on the meta device; `init_weights` fills it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter and buffer.

        A projection gets normal values of variance 1 / fan-in; those that write to the residual stream are
        divided by sqrt(2 L) as well (Radford et al. 2019). The head starts small: a first loss near log(V).
        """
        for name, module in self.named_modules():
            if isinstance(module, Rotary):
                module.init_tables()
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.25)
            elif module is self.head:
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                is_residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(
                    module.weight, std=std / math.sqrt(2 * len(self.layers)) if is_residual else std
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # B, T -> B, T, V
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
