"""Multi-head latent attention: keys and values of all heads are computed from one compressed vector per token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.arguments import explain_torch_keywords
from regard.attention import OBSERVERS, Attention
from regard.masks import Mask
from regard.nn.attention import check_registered, check_width_free, linear, with_scale
from regard.nn.cache import Cache, WindowCache
from regard.nn.cached_attention import max_lookback, shift_to_cache
from regard.nn.context import LayerContext, context_of_call
from regard.nn.rotary import Rotary
from regard.positions import Bias
from regard.quantized import QuantizedTensor, dequantize
from regard.sharding import current_sharding

_INTERLEAVED = Rotary(interleaved=True)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2): a latent and one rotated key per token instead of keys and values.

        c, r   = x W_down;  c = RMSNorm(c)            (B, N, d_latent) and (B, N, d_rotary)
        k_h    = [c W_key_h, rotate(r)],  v_h = c W_value_h                      for each head h
        q_h    = [q_h, rotate(r_h)]  of  x W_q, or of RMSNorm(x W_a) W_b with `d_query_latent`
        output = concat_h(softmax(q_h k_hᵀ / sqrt(d_head + d_rotary)) v_h) W_o

    d_latent: width of the latent c. d_query_latent: width of the compressed queries, or None for plain ones.
    d_head: width of a head without its rotated part, d_model / heads by default. d_rotary: width of the rotated part,
        shared by the keys of all heads, d_head / 2 by default. d_value: width of a head's values, d_head by default.
    attend: mask, bias, sink, dropout, and the score, a `Dot`. rotary: None leaves the rotated part as it is.
    absorb: how keys and values are obtained. False computes those of every head from the latents. True multiplies the
        queries by W_key and the output by W_value instead, so that all heads attend to the latents themselves. Both
        are equal up to rounding. None takes the one with fewer products: False without a cache, True for single steps.

    The cache holds d_latent + d_rotary numbers per token. W_key and W_value of head h are rows of `up`, d_head followed
    by d_value; `freeze` does not pack them. Weights start from N(0, 1 / fan_in), biases from 0.

    >>> import regard as rg, torch
    >>> causal = rg.Attention(mask=rg.causal())
    >>> layer = rg.nn.LatentAttention(64, heads=4, d_latent=16, attend=causal)
    >>> cache, x = layer.cache(), torch.randn(2, 10, 64)
    >>> steps = [layer(part, cache=cache) for part in x.split([7, 1, 2], 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    @explain_torch_keywords("LatentAttention", module=True)
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        d_latent: int,
        d_query_latent: int | None = None,
        d_head: int | None = None,
        d_rotary: int | None = None,
        d_value: int | None = None,
        attend: Attention | None = None,
        rotary: Rotary | None = _INTERLEAVED,
        absorb: bool | None = None,
        bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if heads < 1 or (d_head is None and d_model % heads):
            raise ValueError(
                f"d_model = {d_model} is not a multiple of heads = {heads}; change one of them or pass d_head"
            )
        self.heads, self.d_latent, self.absorb = heads, d_latent, absorb
        self.d_head = d_model // heads if d_head is None else d_head
        self.d_rotary = self.d_head // 2 if d_rotary is None else d_rotary
        self.d_value = self.d_head if d_value is None else d_value
        if self.d_rotary < 2 or self.d_rotary % 2:
            raise ValueError(f"d_rotary must be even and at least 2, got {self.d_rotary}")
        if rotary is not None and rotary.d_rotary not in (None, self.d_rotary):
            raise ValueError(
                f"rotary rotates {rotary.d_rotary} channels, but d_rotary = {self.d_rotary}; leave out its d_rotary"
            )
        width = heads * (self.d_head + self.d_rotary)
        self.query_down = None if d_query_latent is None else linear(d_model, d_query_latent, bias=bias)
        self.query_norm = None if d_query_latent is None else nn.RMSNorm(d_query_latent, eps=eps)
        self.query = linear(d_model if d_query_latent is None else d_query_latent, width, bias=False)
        self.down = linear(d_model, d_latent + self.d_rotary, bias=bias)
        self.norm = nn.RMSNorm(d_latent, eps=eps)
        self.up = nn.Parameter(torch.randn(heads * (self.d_head + self.d_value), d_latent) / math.sqrt(d_latent))
        self.output = linear(heads * self.d_value, d_model, bias=bias)
        self.rotary = rotary
        self.attend = check_registered(with_scale(attend or Attention(), self.d_head + self.d_rotary, type(self)))

    @explain_torch_keywords("LatentAttention.forward", module=True)
    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context: LayerContext | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Map x (B, N, d_model) to (B, N, d_model).

        context: replaces `mask`, `bias` and `positions` when several layers share them.
        cache: from `cache()`; the tokens of x follow the cached ones, as in `MultiHeadAttention`.
        """
        context = context_of_call(context, mask, bias, positions, rotates=self.rotary is not None)
        for name in ("query_position", "key_position", "relative"):
            if getattr(context, name) is not None:
                raise ValueError(f"LatentAttention does not support the {name} of a context")
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"cache must be a Cache, got {type(cache).__name__}; use the one of `cache()`")
        if cache is not None and current_sharding() is not None:
            raise ValueError("a cache cannot be sharded; generate outside of regard.distributed.sequence")
        start = 0 if cache is None else cache.seen_tokens
        query, rotated_query = self._query(x).split((self.d_head, self.d_rotary), -1)
        latent, rotated = self.down(x).split((self.d_latent, self.d_rotary), -1)
        rotated_query, rotated = (
            self._rotate(part, context, start) for part in (rotated_query, rotated.unsqueeze(2))
        )  # (B, N, H, d_rotary) and (B, N, 1, d_rotary)
        keys: Tensor | QuantizedTensor = torch.cat((self.norm(latent), rotated.squeeze(2)), -1).unsqueeze(1)
        if cache is None:
            attend = context.combine(self.attend)
        else:
            assert isinstance(keys, Tensor)
            keys, _ = cache.append(keys, keys[..., :0])
            attend = context.combine(self.attend, cache)
        check_width_free(attend.bias)
        absorb = self._absorbs(x.shape[1], keys.shape[2], cache)
        if cache is not None:
            attend = shift_to_cache(attend, cache, query.transpose(1, 2), self.d_latent if absorb else self.d_value)
        out = (self._attend_to_latents if absorb else self._attend_to_heads)(attend, query, rotated_query, keys)
        return self.output(out.flatten(2))

    def _query(self, x: Tensor) -> Tensor:
        """(B, N, d_model) to (B, N, H, d_head + d_rotary)."""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        return self.query(x).unflatten(-1, (self.heads, -1))

    def _rotate(self, x: Tensor, context: LayerContext, start: int) -> Tensor:
        if self.rotary is None:
            return x
        return self.rotary(x, context.table(self.rotary, self.d_rotary, x, start=start))

    def _absorbs(self, queries: int, keys: int, cache: Cache | None) -> bool:
        """Whether to attend to the latents: the form with fewer products, unless `absorb` says which."""
        if self.absorb is not None:
            return self.absorb
        if cache is not None and not torch.compiler.is_compiling() and OBSERVERS.get():
            return True  # the keys of all steps must be of one kind for a record of them
        up = self.d_latent * (self.d_head + self.d_value)  # products to expand a latent, or to absorb them into a query
        per_pair = self.d_head + self.d_rotary + self.d_value, 2 * self.d_latent + self.d_rotary
        return queries * (up + keys * per_pair[1]) < keys * up + queries * keys * per_pair[0]

    def _attend_to_heads(
        self, attend: Attention, query: Tensor, rotated_query: Tensor, keys: Tensor | QuantizedTensor
    ) -> Tensor:
        """Compute keys and values of every head; return (B, N, H, d_value)."""
        latent, rotated = dequantize(keys, query.dtype).squeeze(1).split((self.d_latent, self.d_rotary), -1)
        key, value = (
            F.linear(latent, self.up).unflatten(-1, (self.heads, -1)).split((self.d_head, self.d_value), -1)
        )  # (B, K, H, ...)
        key = torch.cat((key, rotated.unsqueeze(2).expand(-1, -1, self.heads, -1)), -1)
        query = torch.cat((query, rotated_query), -1)
        return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)

    def _attend_to_latents(
        self, attend: Attention, query: Tensor, rotated_query: Tensor, keys: Tensor | QuantizedTensor
    ) -> Tensor:
        """Let all heads attend to the latents, one key/value head; return (B, N, H, d_value)."""
        up_key, up_value = self.up.unflatten(0, (self.heads, -1)).split((self.d_head, self.d_value), 1)
        query = torch.einsum("bnhd,hdc->bnhc", query, up_key)
        query = torch.cat((query, rotated_query), -1).transpose(1, 2)
        if isinstance(keys, QuantizedTensor):
            values: Tensor | QuantizedTensor = QuantizedTensor(keys.data[..., : self.d_latent], keys.scale, keys.dtype)
        else:
            values = keys[..., : self.d_latent]
        return torch.einsum("bhnc,hec->bnhe", attend(query, keys, values), up_value)

    def cache(self, *, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache of latents: a `WindowCache` if the mask limits how far back a query attends.

        dtype: `torch.bfloat16`, `torch.float16` or `torch.int8` to store the latents in fewer bytes, see `Cache`.
        """
        reach = max_lookback(self.attend)
        return Cache(dtype=dtype) if reach is None else WindowCache(reach + 1, dtype=dtype)
