"""Layers that attend to the keys and values of an earlier layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.arguments import explain_torch_keywords
from regard.attention import Attention
from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention, linear
from regard.nn.cache import Cache, CrossCache
from regard.nn.cached_attention import max_lookback
from regard.nn.context import LayerContext, context_of_call
from regard.positions import Bias


class CrossLayerAttention(MultiHeadAttention):
    """Self-attention with the keys and values of an earlier layer of the same stack (CLA; Brandon et al. 2024).

    Only queries are projected, so that the cache of a stack holds keys and values of the other layers only.

    owner: the earlier layer, a `MultiHeadAttention`, whose widths and rotary embedding this layer has too.
    heads, attend: those of the owner by default; heads is a multiple of its kv_heads.

    >>> import regard as rg, torch
    >>> first = rg.nn.MultiHeadAttention(32, heads=4, kv_heads=2, attend=rg.Attention(mask=rg.causal()))
    >>> second = rg.nn.CrossLayerAttention(first)
    >>> context, x = rg.nn.LayerContext(), torch.randn(2, 5, 32)
    >>> second(first(x, context=context), context=context).shape
    torch.Size([2, 5, 32])
    """

    @explain_torch_keywords("CrossLayerAttention", module=True)
    def __init__(
        self,
        owner: MultiHeadAttention,
        *,
        heads: int | None = None,
        attend: Attention | None = None,
        query_norm: nn.Module | None = None,
        gate: nn.Module | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
    ) -> None:
        if type(owner) is not MultiHeadAttention:
            raise TypeError(f"owner must be a MultiHeadAttention, got {type(owner).__name__}")
        super().__init__(
            owner.output.out_features, owner.heads if heads is None else heads, kv_heads=owner.kv_heads,
            d_head=owner.d_head, d_value=owner.d_value, attend=owner.attend if attend is None else attend,
            rotary=owner.rotary, query_norm=query_norm, gate=gate, bias=bias, output_bias=output_bias,
        )  # fmt: skip
        self.qkv = linear(owner.output.out_features, self.widths[0], bias=bias)  # of queries only
        self._owner = (owner,)  # in a tuple: its parameters are not those of this layer
        owner.readers += 1
        reaches = max_lookback(self.attend), owner.reader_lookback
        owner.reader_lookback = None if reaches[0] is None or reaches[1] is None else max(reaches[0], reaches[1])

    @explain_torch_keywords("CrossLayerAttention.forward", module=True)
    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context: LayerContext | None = None,
        cache: Cache | CrossCache | None = None,
    ) -> Tensor:
        """Map x (B, N, d_model) to (B, N, d_model), after the owner has run with the same `context`.

        cache: an empty one, for its place in the list of a stack: keys and values are in the cache of the owner.
        """
        if context is None or source is not None:
            raise ValueError(
                "CrossLayerAttention attends to the keys and values of its owner: pass the `context` that the owner "
                "was called with, and no source"
            )
        context = context_of_call(context, mask, bias, positions, rotates=self.rotary is not None)
        if isinstance(cache, CrossCache) or (cache is not None and cache.seen_tokens):
            raise ValueError("the cache of CrossLayerAttention must be an empty Cache; use the one of `cache()`")
        shared = context.take_shared(self._owner[0])
        if shared is None:
            raise ValueError(
                "the owner of this CrossLayerAttention has not run with this context, or fewer times than the layers "
                "that share its keys; run whole stacks, without checkpointing"
            )
        seen = shared.keys.shape[2] if shared.cache is None else shared.cache.seen_tokens
        if len(x) != shared.keys.shape[0] or (cache is None) != (shared.cache is None) or x.shape[1] > seen:
            raise ValueError(
                f"x is {tuple(x.shape)}, but the owner was called with {shared.keys.shape[0]} rows and "
                f"{shared.keys.shape[2]} keys; pass the tokens of the same call, with a cache for both or for none"
            )
        q = self._rotate(self._query(x, context), context, 0 if shared.cache is None else seen - x.shape[1])
        return self.project_output(
            x, self.attend_to(q.transpose(1, 2), shared.keys, shared.values, context, shared.cache)
        )

    def cache(self, *, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache, which stays empty."""
        return Cache()
