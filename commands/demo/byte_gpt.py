"""Defines the demo's model: a byte-level GPT, small enough to understand and for two CPU cores.

Nothing here depends on pacecar.  Without dropout and batch norm, the size of a micro-batch changes only the order of
summation, as the `exact` class of knobs requires.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody knows it by
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The size of a GPT.

    The default has 1.3 million parameters and a short context: with a small micro-batch most of the time goes into
    launching operators and into reading the weights, as on a GPU.  It is so small that a laptop's processor makes some
    twenty steps a second: a gain is then measured many times before the load on the machine changes.  More layers would
    cost more operators, and an exact window costs by the operator.
    """

    vocabulary: int = 256
    context: int = 16
    width: int = 160
    layers: int = 4
    heads: int = 5


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_up = nn.Linear(width, 4 * width)
        self.feed_down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; `x` is (batch, time, width)."""
        batch, time, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return cast(Tensor, x + self.feed_down(F.gelu(self.feed_up(self.feed_norm(x)))))


class GPT(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's initialization: what adds to the residual stream is scaled by its depth.
                is_residual = name.endswith(("attention_out.weight", "feed_down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, time, vocabulary) for `tokens` (batch, time), time at most the context."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))
