"""The yardstick: one sequence after the other, with the reference engine and attention modules written step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES, exclude_engine
from regard.nn import LayerContext, MultiHeadAttention


@contextmanager
def use_reference() -> Iterator[None]:
    """Inside this context, only the reference engine computes, and `MultiHeadAttention` runs `multi_head`."""
    with ExitStack() as stack:
        for name in [name for name in ENGINES if name != "reference"]:
            stack.enter_context(exclude_engine(name))
        stack.enter_context(mock.patch.object(MultiHeadAttention, "forward", multi_head))
        yield


def multi_head(
    self: MultiHeadAttention,
    x: Tensor,
    source: Tensor | None = None,
    *,
    mask: Any = None,
    bias: Any = None,
    positions: Tensor | None = None,
    context: LayerContext | None = None,
    cache: None = None,
) -> Tensor:
    """`MultiHeadAttention.forward` with every projection, norm and rotation on its own line, and no cache."""
    assert cache is None, "the yardstick knows no cache"
    context = LayerContext(mask, bias, positions) if context is None else context
    keys = x if source is None else source
    weight, offset = self.qkv.weight, self.qkv.bias
    w_key, b_key = (weight, offset) if self.source is None else (self.source.weight, self.source.bias)
    first = self.widths[0] if self.source is None else 0
    middle, last = first + self.widths[1], first + self.widths[1] + self.widths[2]

    def project(inputs: Tensor, w: Tensor, b: Tensor | None, start: int, stop: int, heads: int) -> Tensor:
        return F.linear(inputs, w[start:stop], None if b is None else b[start:stop]).unflatten(-1, (heads, -1))

    q_input = x if context.query_position is None else x + context.query_position
    k_input = keys if context.key_position is None else keys + context.key_position
    q = project(q_input, weight, offset, 0, self.widths[0], self.heads)
    k = project(k_input, w_key, b_key, first, middle, self.kv_heads)
    v = project(keys, w_key, b_key, middle, last, self.kv_heads)
    q = q if self.query_norm is None else self.query_norm(q)
    k = k if self.key_norm is None else self.key_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, N, D)
    if (turn := self.rotary) is not None:
        options: dict[str, Any] = {
            "base": turn.base,
            "d_rotary": turn.d_rotary,
            "interleaved": turn.interleaved,
            "scaling": turn.scaling,
        }
        q = rg.rotary(q, context.positions, **options)
        k = rg.rotary(k, context.positions if source is None else None, **options)
    out = context.combine(self.attend)(q, k, v)
    return F.linear(out.transpose(1, 2).flatten(2), self.output.weight, self.output.bias)
