"""The blocks of a stack that reads a whole sequence at once, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from regard.attention import Attention
from regard.models.components import ARRANGEMENTS, choose
from regard.nn import ACTIVATIONS, Block, FeedForward, MultiHeadAttention


class BlockConfig(Protocol):
    """What the configurations of models have in common."""

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
    """So many blocks; with `cross` each also looks at another sequence."""
    dropped = config.dropout if config.attention_dropout is None else config.attention_dropout
    own, across = Attention(dropout=dropped), Attention(offset=0, dropout=dropped)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)

    def attention(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.heads, attend=attend, bias=qkv_bias, output_bias=True)

    return [
        Block(
            attention(own),
            FeedForward(config.d_model, config.d_hidden, activation=activation),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
            cross=attention(across) if cross else None,
        )
        for _ in range(count)
    ]
