"""Blocks of encoder stacks, built from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from regard.attention import Attention
from regard.models.components import ARRANGEMENTS, choose
from regard.nn import ACTIVATIONS, Block, FeedForward, MultiHeadAttention


class BlockConfig(Protocol):
    """The fields of a configuration that `build_blocks` reads."""

    @property
    def d_model(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def d_hidden(self) -> int: ...
    @property
    def arrangement(self) -> str: ...
    @property
    def activation(self) -> str: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float | None: ...


def build_blocks(
    config: BlockConfig, count: int, norm: Callable[[int], nn.Module], *, cross: bool = False, qkv_bias: bool = True
) -> list[Block]:
    """Build `count` blocks; with `cross`, each has cross-attention."""
    attention_dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    self_attend, cross_attend = Attention(dropout=attention_dropout), Attention(offset=0, dropout=attention_dropout)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)

    def attention(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.heads, attend=attend, bias=qkv_bias, output_bias=True)

    return [
        Block(
            attention(self_attend),
            FeedForward(config.d_model, config.d_hidden, activation=activation),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
            cross=attention(cross_attend) if cross else None,
        )
        for _ in range(count)
    ]
