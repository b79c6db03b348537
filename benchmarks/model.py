"""The model that is trained, and what it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt import GPT, GPTConfig

Batch = tuple[torch.Tensor, torch.Tensor]
LARGEST_STRIDE = 8


@dataclass(frozen=True)
class Task:
    """A model's sizes and its batches, which follow from a seed alone.

    A sequence starts anywhere in the vocabulary and goes on in equal strides of 1 to 8, so that it can be
    continued after two tokens. A model that does not learn this does not train.
    """

    gpt: GPTConfig
    tokens: int  # of a rank (of a TP group), an iteration
    seed: int
    experts: int = 0  # of a layer, in place of its feed-forward layer; 0: no mixture of experts

    @property
    def sequences(self) -> int:
        return self.tokens // self.gpt.seq_len

    @property
    def hidden(self) -> int:
        """Feed-forward width: of an expert, half of the whole layer's."""
        return self.gpt.hidden // 2 if self.experts else self.gpt.hidden

    def describe(self) -> str:
        """The sizes, in words."""
        sizes = self.gpt
        experts = f", {self.experts} experts a layer and one to a token" if self.experts else ""
        return (
            f"GPT of width {sizes.width}, {sizes.layers} layers, {sizes.heads} heads, feed-forward width "
            f"{self.hidden}{experts}, vocabulary {sizes.vocab_size}, in float32; {self.sequences} sequences "
            f"of {sizes.seq_len} tokens per rank"
        )

    def model(self) -> GPT:
        """The model with its initial weights, the same at every call and on every rank."""
        torch.manual_seed(self.seed)
        model = GPT(self.gpt)
        if self.experts:
            for layer in model.layers:
                layer.mlp = Experts(self.experts, self.gpt.width, self.hidden)
        model.init_weights()
        return model

    def batch(self, iteration: int, place: int, places: int) -> Batch:
        """Inputs and targets, int64 of shape (sequences, seq_len), of one data-parallel place."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + iteration) * places + place)
        start = torch.randint(self.gpt.vocab_size, (self.sequences, 1), generator=generator)
        stride = torch.randint(1, LARGEST_STRIDE + 1, (self.sequences, 1), generator=generator)
        tokens = (start + stride * torch.arange(self.gpt.seq_len + 1)) % self.gpt.vocab_size  # B, T + 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Experts(nn.Module):
    """A mixture of experts of one token each, by the token's place in the sequence.

    Nothing is routed: all peers, and all experts, have the same work in every iteration.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.up_proj = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B, T, D
        experts = len(self.gate_proj)
        tokens = x.unflatten(1, (-1, experts)).movedim(2, 0)  # E, B, T/E, D
        flat = tokens.flatten(1, 2)
        inner = F.silu(flat @ self.gate_proj.mT) * (flat @ self.up_proj.mT)
        return (inner @ self.down_proj.mT).view(tokens.shape).movedim(0, 2).flatten(1, 2)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy in nats per token, of this rank's batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
