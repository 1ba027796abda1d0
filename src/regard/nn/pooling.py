"""One vector for a sequence. Every pooling takes (B, N, width) with a (B, N) mask, or a packed batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.masks import ranges
from regard.nn.packing import Packed
from regard.nn.shared import key_mask
from regard.scores import Dot


class Mean(nn.Module):
    """The mean of the real tokens.

    >>> import regard as rg, torch
    >>> rg.nn.Mean()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            return torch.segment_reduce(x.values, "mean", lengths=torch.tensor(x.lengths, device=x.values.device))
        if mask is None:
            return x.mean(1)
        share = mask.to(x.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
        return (share.unsqueeze(1) @ x.masked_fill(~mask.unsqueeze(-1), 0.0)).squeeze(1)


class Max(nn.Module):
    """The largest of the real tokens, channel by channel.

    >>> import regard as rg, torch
    >>> rg.nn.Max()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[3.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            return torch.segment_reduce(x.values, "max", lengths=torch.tensor(x.lengths, device=x.values.device))
        return (x if mask is None else x.masked_fill(~mask.unsqueeze(-1), -math.inf)).amax(1)


class First(nn.Module):
    """The first token, such as BERT's [CLS].

    >>> import regard as rg, torch
    >>> rg.nn.First()(torch.tensor([[[1.0], [3.0]]]))
    tensor([[1.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            return x.values[torch.from_numpy(x.edges[:-1]).to(x.values.device)]
        return x[:, 0]


class Last(nn.Module):
    """The last real token, which has seen all others where attention is causal.

    >>> import regard as rg, torch
    >>> rg.nn.Last()(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[3.]])
    """

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            return x.values[torch.from_numpy(x.edges[1:] - 1).to(x.values.device)]
        if mask is None:
            return x[:, -1]
        at = torch.arange(x.shape[1], device=x.device).where(mask, 0).amax(1)
        return x[torch.arange(len(x), device=x.device), at]


class AttentionPooling(nn.Module):
    """A learned query looks at the real tokens: `softmax(x · query / sqrt(width)) x`; the query starts from N(0, 1).

    >>> import regard as rg, torch
    >>> rg.nn.AttentionPooling(16)(torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)).shape
    torch.Size([2, 16])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            tokens, edges = x.values[None, None], torch.from_numpy(x.edges)
            query = self.query.expand(1, 1, len(x), -1).to(tokens)
            return Attention(Dot(), ranges(edges[:-1], edges[1:]), offset=0).here(query, tokens, tokens)[0, 0]
        tokens = x.unsqueeze(1)
        query = self.query.expand(len(x), 1, 1, -1).to(x)
        return Attention(Dot(), key_mask(mask), offset=0).here(query, tokens, tokens)[:, 0, 0]
