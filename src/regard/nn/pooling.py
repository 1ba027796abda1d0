"""Poolings of a sequence into one vector. All take (B, N, d_model) with a (B, N) mask, or a packed batch.

A sequence without real tokens is pooled to zeros. Sums are computed in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.masks import ranges
from regard.nn.context import check_mask, key_mask
from regard.nn.packing import Packed, unpack
from regard.scores import Dot


class Mean(nn.Module):
    """Mean of the real tokens.

    >>> import regard as rg, torch
    >>> rg.nn.Mean()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        values = _values(x, mask)
        wide = torch.promote_types(values.dtype, torch.float32)
        if isinstance(x, Packed):
            return _pool_each(x, lambda tokens: tokens.mean(0, dtype=wide).to(tokens.dtype))
        if mask is None:
            return (values.sum(1, dtype=wide) / max(values.shape[1], 1)).to(values.dtype)
        total = values.masked_fill(~mask[..., None], 0.0).sum(1, dtype=wide)
        return (total / mask.sum(1, keepdim=True).clamp(min=1)).to(values.dtype)


class Max(nn.Module):
    """Maximum of the real tokens, per channel.

    >>> import regard as rg, torch
    >>> rg.nn.Max()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[3.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        values = _values(x, mask)
        if isinstance(x, Packed):
            return _pool_each(x, lambda tokens: tokens.amax(0))
        if not values.shape[1]:
            return values.sum(1)  # zeros
        if mask is None:
            return values.amax(1)
        largest = values.masked_fill(~mask[..., None], -math.inf).amax(1)
        return largest.masked_fill(~mask.any(1, keepdim=True), 0.0)


class First(nn.Module):
    """The first real token, such as BERT's [CLS].

    >>> import regard as rg, torch
    >>> rg.nn.First()(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[False, True]]))
    tensor([[3.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        values = _values(x, mask)
        if isinstance(x, Packed):
            return _pool_each(x, lambda tokens: tokens[0])
        if not values.shape[1]:
            return values.sum(1)  # zeros
        return values[:, 0] if mask is None else _select_tokens(values, mask, mask.int().argmax(1))


class Last(nn.Module):
    """The last real token; under causal attention the only one that depends on all tokens.

    >>> import regard as rg, torch
    >>> rg.nn.Last()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[3.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        values = _values(x, mask)
        if isinstance(x, Packed):
            return _pool_each(x, lambda tokens: tokens[-1])
        if not values.shape[1]:
            return values.sum(1)  # zeros
        indices = torch.arange(values.shape[1], device=values.device)
        return values[:, -1] if mask is None else _select_tokens(values, mask, indices.where(mask, 0).amax(1))


class AttentionPooling(nn.Module):
    """Attention of a learned query to the real tokens: `softmax(x · query / sqrt(d_model)) x`; query from N(0, 1).

    >>> import regard as rg, torch
    >>> rg.nn.AttentionPooling(16)(torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)).shape
    torch.Size([2, 16])
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(d_model))

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        values = _values(x, mask)
        if isinstance(x, Packed):
            tokens, edges = values[None, None], torch.from_numpy(x.cu_seqlens)
            query = self.query.expand(1, 1, len(x), -1).to(tokens)
            return Attention(Dot(), ranges(edges[:-1], edges[1:]), offset=0).forward_local(query, tokens, tokens)[0, 0]
        tokens = values.unsqueeze(1)
        query = self.query.expand(len(values), 1, 1, -1).to(values)
        return Attention(Dot(), key_mask(mask), offset=0).forward_local(query, tokens, tokens)[:, 0, 0]


def _values(x: Tensor | Packed, mask: Tensor | None) -> Tensor:
    """Return the tokens, (B, N, d_model) or packed (N, d_model), after checking the mask."""
    if isinstance(x, Packed):
        if mask is not None:
            raise ValueError("a packed batch takes no mask: its lengths are known; omit `mask`")
        return x.values
    if mask is not None:
        check_mask(mask, x.shape[:2])
    return x


def _pool_each(x: Packed, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """Pool each sequence (n, d_model); an empty sequence is pooled to zeros (an empty sum)."""
    rows = [pool(tokens) if len(tokens) else tokens.sum(0) for tokens in unpack(x)]
    return torch.stack(rows) if rows else x.values


def _select_tokens(x: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """Select token `index[b]` of each row; zeros if a row has no real tokens."""
    return x[torch.arange(len(x), device=x.device), index].masked_fill(~mask.any(1, keepdim=True), 0.0)
