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

    @property
    def sequences(self) -> int:
        return self.tokens // self.gpt.seq_len

    def describe(self) -> str:
        """The sizes, in words."""
        sizes = self.gpt
        return (
            f"GPT of width {sizes.width}, {sizes.layers} layers, {sizes.heads} heads, feed-forward width "
            f"{sizes.hidden}, vocabulary {sizes.vocab_size}, in float32; {self.sequences} sequences of "
            f"{sizes.seq_len} tokens per rank"
        )

    def model(self) -> GPT:
        """The model with its initial weights, the same at every call and on every rank."""
        torch.manual_seed(self.seed)
        model = GPT(self.gpt)
        model.init_weights()
        return model

    def batch(self, iteration: int, place: int, places: int) -> Batch:
        """Inputs and targets, int64 of shape (sequences, seq_len), of one data-parallel place."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + iteration) * places + place)
        start = torch.randint(self.gpt.vocab_size, (self.sequences, 1), generator=generator)
        stride = torch.randint(1, LARGEST_STRIDE + 1, (self.sequences, 1), generator=generator)
        tokens = (start + stride * torch.arange(self.gpt.seq_len + 1)) % self.gpt.vocab_size  # B, T + 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy in nats per token, of this rank's batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
