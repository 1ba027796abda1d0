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
    config: BlockConfig,
    count: int,
    norm: Callable[[int], nn.Module],
    *,
    cross: bool = False,
    qkv_bias: bool = True,
    attention: Callable[[int], nn.Module] | None = None,
    feedforward: Callable[[], nn.Module] | None = None,
) -> list[Block]:
    """Build `count` blocks; with `cross`, each has cross-attention.

    attention: builds the self-attention of layer n. feedforward: builds a feed-forward layer.
    """
    self_attend = Attention(dropout=attention_dropout(config))
    cross_attend = Attention(offset=0, dropout=attention_dropout(config))
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)

    def multi_head(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.heads, attend=attend, bias=qkv_bias, output_bias=True)

    return [
        Block(
            multi_head(self_attend) if attention is None else attention(n),
            FeedForward(config.d_model, config.d_hidden, activation=activation) if feedforward is None
            else feedforward(),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
            cross=multi_head(cross_attend) if cross else None,
        )
        for n in range(count)
    ]  # fmt: skip


def attention_dropout(config: BlockConfig) -> float:
    """Return the dropout of attention weights, by default that of the model."""
    return config.dropout if config.attention_dropout is None else config.attention_dropout
