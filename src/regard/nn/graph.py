"""Graph attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.nn.attention import linear
from regard.nn.context import LayerContext, check_not_in_context
from regard.scores import Additive


class GraphAttention(nn.Module):
    """Attention of nodes to their neighbours with an additive score per head (GATv2).

        score(i, j) = weight · tanh(W_q x_i + W_k x_j)

    The mask defines the graph: `regard.edges(pairs)`, with a pair (i, i) for every node that attends to itself. In
    Graph Attention Networks the nonlinearity comes after the sum, so that all nodes rank neighbours alike; here it is
    inside, as in GATv2. Projections start from N(0, 1 / fan_in), the weight from N(0, 1 / d_head).
    dropout: probability for attention weights, in training.

    >>> import regard as rg, torch
    >>> layer = rg.nn.GraphAttention(16, heads=2)
    >>> layer(torch.randn(1, 3, 16), mask=rg.edges(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]]))).shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, d_model: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise ValueError(f"d_model = {d_model} is not a multiple of heads = {heads}; change one of them")
        self.heads, self.dropout = heads, dropout
        self.qkv, self.output = linear(d_model, 3 * d_model), linear(d_model, d_model)
        self.weight = nn.Parameter(torch.randn(heads, d_model // heads) / math.sqrt(d_model // heads))

    def forward(
        self, x: Tensor, *, mask: Any = None, context: LayerContext | None = None, cache: None = None
    ) -> Tensor:
        """Map x (B, N, d_model) to (B, N, d_model); inside a stack, `context` replaces `mask`."""
        if context is None:
            context = LayerContext(mask)
        else:
            check_not_in_context(mask=mask)
        if cache is not None or context.query_position is not None or context.key_position is not None:
            raise ValueError("GraphAttention takes no cache, query_position or key_position")
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        attend = Attention(Additive(self.weight), dropout=self.dropout if self.training else 0.0)
        out = context.combine(attend)(q, k, v)
        return self.output(out.transpose(1, 2).flatten(2))
