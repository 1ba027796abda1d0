"""Attention layers: attention with its input and output projections."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.arguments import explain_torch_keywords
from regard.attention import Attention, Keys
from regard.engines.packed_linear import project
from regard.masks import Mask
from regard.nn.cache import Cache, CrossCache, Stored, WindowCache
from regard.nn.cached_attention import ignores_query_position, max_lookback, shift_to_cache
from regard.nn.context import LayerContext, RelativePositions, context_of_call
from regard.nn.rotary import Rotary
from regard.positions import Bias, dense_bias
from regard.positions.biases import Shaw, is_built_in
from regard.scores import Additive, Dot, Modified
from regard.sharding import current_sharding


class SelfAttention(nn.Module):
    """One head of self-attention: projections to `d_key`, `d_key` and `d_value`, attention, and back to `d_model`.

        q, k, v = x W_q, x W_k, x W_v          (B, N, d_model) -> d_key, d_key, d_value
        output  = softmax(q kᵀ / sqrt(d_key)) v W_o

    Weights start from N(0, 1 / fan_in), biases from 0.

    >>> import regard as rg, torch
    >>> layer = rg.nn.SelfAttention(d_model=32, d_key=16, d_value=24)
    >>> layer(torch.randn(2, 10, 32), mask=rg.causal()).shape
    torch.Size([2, 10, 32])
    """

    def __init__(self, d_model: int, d_key: int, d_value: int, *, attend: Attention | None = None) -> None:
        super().__init__()
        self.query, self.key = linear(d_model, d_key), linear(d_model, d_key)
        self.value, self.output = linear(d_model, d_value), linear(d_value, d_model)
        self.attend = check_registered(attend or Attention())

    def forward(self, x: Tensor, *, mask: Mask | Tensor | None = None, bias: Bias | Tensor | None = None) -> Tensor:
        """(B, N, d_model) to (B, N, d_model)."""
        q, k, v = (part(x).unsqueeze(-3) for part in (self.query, self.key, self.value))  # (B, 1, N, ...)
        return self.output(LayerContext(mask, bias).combine(self.attend)(q, k, v).squeeze(-3))


class MultiHeadAttention(nn.Module):
    """Multi-head attention: self-attention, or cross-attention if `forward` is given a `source`.

    heads, kv_heads: numbers H of query heads and G of key/value heads. By default equal; kv_heads=1 is
        multi-query attention.
    d_head, d_value: widths D and E of a head, d_model / heads by default.
    d_source: width of the source, d_model by default.
    attend: score, mask, bias, sink and dropout (dropout is applied in training only). Its tensors become parameters or
        buffers of this module. Layers that share one object share its tensors and plans.
    rotary: rotates q and k by their positions. query_norm, key_norm: modules over (..., H, D), applied before `rotary`.
    gate: a module that maps x (B, N, d_model) and the heads' outputs (B, N, H, E) to new outputs, as `OutputGate`.

    One weight holds the three projections (rows: query heads, key heads, value heads), so that self-attention needs a
    single matrix product. Weights start from N(0, 1 / fan_in), biases from 0; a stack may scale the output weight down.

    >>> import regard as rg, torch
    >>> layer = rg.nn.MultiHeadAttention(64, heads=8, kv_heads=2, attend=rg.Attention(mask=rg.causal()))
    >>> layer(torch.randn(2, 10, 64), mask=rg.padding([10, 7])).shape
    torch.Size([2, 10, 64])
    """

    rearranges_heads = False  # whether keys of several heads are side by side: queries and values have other widths

    @explain_torch_keywords("MultiHeadAttention", module=True)
    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        d_source: int | None = None,
        attend: Attention | None = None,
        rotary: Rotary | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        gate: nn.Module | None = None,
        bias: bool = True,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if heads < 1 or self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(
                f"heads must be a positive multiple of kv_heads, got heads={heads} and kv_heads={self.kv_heads}"
            )
        if d_head is None and d_model % heads:
            raise ValueError(
                f"d_model = {d_model} is not a multiple of heads = {heads}; change one of them or pass d_head"
            )
        self.d_head = d_model // heads if d_head is None else d_head
        self.d_value = self.d_head if d_value is None else d_value
        if (
            rotary is not None
            and not 2 <= (d_rotary := rotary.d_rotary or self.d_head) - d_rotary % 2 == d_rotary <= self.d_head
        ):
            raise ValueError(
                f"d_rotary must be even and between 2 and d_head = {self.d_head}, got {d_rotary}; "
                "pass Rotary(d_rotary=...) to rotate only part of each head"
            )
        self.widths = [heads * self.d_head, self.kv_heads * self.d_head, self.kv_heads * self.d_value]  # of q, k and v
        separate = d_source is not None and d_source != d_model
        self.qkv = linear(d_model, self.widths[0] if separate else sum(self.widths), bias=bias)
        self.source = linear(d_source or d_model, sum(self.widths[1:]), bias=bias) if separate else None
        self.output = linear(heads * self.d_value, d_model, bias=bias if output_bias is None else output_bias)
        self.rotary, self.query_norm, self.key_norm, self.gate = rotary, query_norm, key_norm, gate
        self.readers = 0  # layers that attend to the keys and values of this one, see CrossLayerAttention
        self.reader_lookback: int | None = 0  # how far back any of them attends, None if it is unlimited
        self.attend = check_registered(attend or Attention())

    @explain_torch_keywords("MultiHeadAttention.forward", module=True)
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
        """Map x (B, N, d_model) to (B, N, d_model), attending to x itself or to `source` (B, K, d_source).

        context: replaces `mask`, `bias` and `positions` when several layers share them.
        cache: with a `Cache`, the tokens of x follow the cached ones. Rotary positions, masks, biases and the offset
            count from the first token of the sequence, and a token attends to no token that comes after this call.
            With a `CrossCache`, the source is projected in the first call only; a source passed again is compared
            with the first one, which takes time.
        """
        context = context_of_call(context, mask, bias, positions, rotates=self.rotary is not None)
        if self.rearranges_heads:
            check_width_free(context.bias)
        if cache is not None and current_sharding() is not None:
            raise ValueError("a cache cannot be sharded; generate outside of regard.distributed.sequence")
        if isinstance(cache, CrossCache):
            return self._cross_attend(x, source, context, cache)
        if source is None and self.source is not None:
            raise ValueError(
                f"this attention has d_source = {self.source.in_features} and needs a source; pass `source`"
            )
        if source is not None and cache is not None:
            raise ValueError("cross-attention takes a CrossCache, got a Cache: the keys of a source do not grow")
        start = 0 if cache is None else cache.seen_tokens
        separate_inputs = (self.query_norm, self.key_norm, context.query_position, context.key_position)
        if source is None and all(part is None for part in separate_inputs):
            q, k, v = self._fused_projection(x, context, start)
        else:
            q = self._rotate(self._query(x, context), context, start)
            k, v = self._key_value(x if source is None else source, context)
            k = self._rotate(k, context, start, of_source=source is not None)
        q, (k, v) = self.arrange_query(q), self.arrange_key_value(k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.relative is not None:
            attend = self._add_relative(context.combine(self.attend), q, k, context.relative, source, cache)
            out = attend(q, k, v)
        else:
            keys, values = self._append(k, v, context, cache)
            out = self.attend_to(q, keys, values, context, cache)
        return self.project_output(x, out)

    def arrange_query(self, q: Tensor) -> Tensor:
        """Return queries (B, N, H, D) as the attention takes them; a subclass may change heads and widths."""
        return q

    def arrange_key_value(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, K, G, D) and values (B, K, G, E) as the attention takes them and a cache stores them."""
        return k, v

    def arrange_output(self, out: Tensor) -> Tensor:
        """Return outputs of the attention as outputs of the heads (B, N, H, E)."""
        return out

    def project_output(self, x: Tensor, out: Tensor) -> Tensor:
        """Map outputs (B, H, N, E) of the attention, for inputs x, to (B, N, d_model)."""
        out = self.arrange_output(out.transpose(1, 2))
        if self.gate is not None:
            out = self.gate(x, out)
        return self.output(out.flatten(2))

    def _append(self, k: Tensor, v: Tensor, context: LayerContext, cache: Cache | None) -> Stored:
        """Return all keys and values (B, G, K, ...), with those of the cache; keep them for layers that share them."""
        stored: Stored = (k, v) if cache is None else cache.append(k, v)
        if self.readers:
            context.share(self, stored, cache, self.readers)
        return stored

    def attend_to(self, q: Tensor, keys: Keys, values: Keys, context: LayerContext, cache: Cache | None) -> Tensor:
        """Attend from q (B, H, N, D) to all keys and values; the result (B, H, N, E) has the strides of q."""
        if cache is None:
            return context.combine(self.attend)(q, keys, values)
        attend = context.combine(self.attend, cache)
        return shift_to_cache(attend, cache, q, values.shape[-1])(q, keys, values)

    def _fused_projection(self, x: Tensor, context: LayerContext, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to q (B, N, H, D), k (B, N, G, D) and v (B, N, G, E) with one product."""
        B, N, _ = x.shape
        H, G, D = self.heads, self.kv_heads, self.d_head
        qkv = self.qkv(x)
        if self.rotary is None and self.d_value == D:
            q, k, v = qkv.view(B, N, H + 2 * G, D).split((H, G, G), 2)
            return q, k, v
        qk, v = qkv.split((self.widths[0] + self.widths[1], self.widths[2]), -1)
        q, k = self._rotate(qk.view(B, N, H + G, D), context, start).split((H, G), 2)
        return q, k, v.view(B, N, G, self.d_value)

    def _query(self, x: Tensor, context: LayerContext) -> Tensor:
        if context.query_position is not None:
            x = x + context.query_position
        q = project_rows(self.qkv, x, 0, self.widths[0])
        q = q.unflatten(-1, (self.heads, self.d_head))
        return q if self.query_norm is None else self.query_norm(q)

    def _key_value(self, source: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        layer, first = (self.qkv, self.widths[0]) if self.source is None else (self.source, 0)
        middle, last = first + self.widths[1], first + sum(self.widths[1:])
        if context.key_position is None:
            k, v = project_rows(layer, source, first, last).split(self.widths[1:], -1)
        else:
            k = project_rows(layer, source + context.key_position, first, middle)
            v = project_rows(layer, source, middle, last)
        k, v = k.unflatten(-1, (self.kv_heads, self.d_head)), v.unflatten(-1, (self.kv_heads, self.d_value))
        return k if self.key_norm is None else self.key_norm(k), v

    def _rotate(self, x: Tensor, context: LayerContext, start: int = 0, *, of_source: bool = False) -> Tensor:
        if self.rotary is None:
            return x
        return self.rotary(x, context.table(self.rotary, self.d_head, x, start=start, of_source=of_source))

    def _add_relative(
        self, attend: Attention, q: Tensor, k: Tensor, relative: RelativePositions, source: Tensor | None,
        cache: Cache | None,
    ) -> Attention:  # fmt: skip
        """Return `attend` with the bias of disentangled attention, for q and k (B, H, N, D)."""
        score = attend.score
        plain = type(self) is MultiHeadAttention and not self.readers and self.heads == self.kv_heads
        if source is not None or cache is not None or not plain or current_sharding() is not None:
            raise ValueError(
                "disentangled attention is self-attention with equally many heads of queries and keys, without a cache "
                "and without sharding"
            )
        if not isinstance(score, Dot) or score.softcap is not None:
            raise ValueError(f"disentangled attention needs the score Dot() without a softcap, got {score!r}")
        projected = project_rows(self.qkv, relative.vectors, 0, sum(self.widths[:2]))
        query, key = projected.unflatten(-1, (2, self.heads, self.d_head)).permute(1, 2, 0, 3)  # (H, R, D) each
        rows = relative.rows.expand(*q.shape[:2], -1, -1)  # (B, H, N, N)
        to_positions = (q @ key.mT).gather(-1, rows)
        from_positions = (k @ query.mT).gather(-1, rows.mT).mT
        scale = score.scale_for(self.d_head)
        scale = scale[:, None, None] if isinstance(scale, Tensor) and scale.dim() else scale
        bias = dense_bias((to_positions + from_positions) * scale)
        return attend.replace(bias=bias if attend.bias is None else attend.bias + bias)

    def _cross_attend(self, x: Tensor, source: Tensor | None, context: LayerContext, cross_cache: CrossCache) -> Tensor:
        """Cross-attention to cached keys and values; the rows of x are the beams of each source."""
        if cross_cache.keys_values is None:
            if source is None:
                raise ValueError("the CrossCache is empty; pass `source` in the first call")
            k, v = self._key_value(source, context)
            k, v = self.arrange_key_value(self._rotate(k, context, of_source=True), v)
            cross_cache.store(source, k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous())
        else:
            cross_cache.check_source(source)
        assert cross_cache.keys_values is not None
        (k, v), start, (rows, count) = cross_cache.keys_values, cross_cache.seen_tokens, x.shape[:2]
        beams = cross_cache.beams(rows, count)
        q = self.arrange_query(self._rotate(self._query(x, context), context, start))  # (B * beams, N, H, D)
        attend = context.combine(self.attend)
        if ignores_query_position(attend):  # then the beams of a source can be queries of one call
            q = q.reshape(len(k), beams * count, *q.shape[2:])
        else:
            if attend.offset is None:
                raise ValueError(
                    f"{attend!r} depends on query positions, which by default are aligned with the last query; that is "
                    "not known while decoding. Pass an explicit offset, such as Attention(offset=0)"
                )
            if start:
                attend = attend.replace(offset=attend.offset + start)
            if beams > 1:
                k, v = k.repeat_interleave(beams, 0), v.repeat_interleave(beams, 0)
        out = attend(q.transpose(1, 2), k, v).transpose(1, 2)
        return self.project_output(x, out.reshape(rows, count, *out.shape[2:]).transpose(1, 2))

    def cache(self, *, dtype: torch.dtype | None = None) -> Cache:
        """Return an empty cache for this layer: a `WindowCache` if the mask limits how far back a query attends.

        Layers that attend to its keys and values count too.

        dtype: `torch.bfloat16`, `torch.float16` or `torch.int8` to store keys and values in fewer bytes, see `Cache`.
        """
        reaches = max_lookback(self.attend), self.reader_lookback
        if reaches[0] is None or reaches[1] is None:
            return Cache(dtype=dtype)
        return WindowCache(max(reaches[0], reaches[1]) + 1, dtype=dtype)


class TokenNorm(nn.Module):
    """Apply a norm over H * D channels to the heads (..., H, D) of a token together, as `query_norm` (OLMo 2).

    >>> import regard as rg, torch
    >>> rg.nn.TokenNorm(torch.nn.RMSNorm(2 * 8))(torch.randn(3, 2, 8)).shape
    torch.Size([3, 2, 8])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view(x.shape)


class AdditiveAttention(nn.Module):
    """Bahdanau attention with its projections: `weight · tanh(W_q x + W_k y)`, softmax, weighted sum of y.

    Queries are projected from x (B, Q, d_query), keys from y (B, K, d_source); the values are y. The projections
    start from N(0, 1 / fan_in), the weight from N(0, 1 / d_hidden).

    >>> import regard as rg, torch
    >>> layer = rg.nn.AdditiveAttention(d_query=16, d_source=24, d_hidden=32)
    >>> layer(torch.randn(2, 5, 16), torch.randn(2, 7, 24), mask=rg.padding([7, 4])).shape
    torch.Size([2, 5, 24])
    """

    def __init__(self, d_query: int, d_source: int, d_hidden: int) -> None:
        super().__init__()
        self.query, self.key = linear(d_query, d_hidden), linear(d_source, d_hidden, bias=False)
        self.weight = nn.Parameter(torch.randn(d_hidden) / math.sqrt(d_hidden))

    def forward(self, x: Tensor, source: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """(B, Q, d_query) and (B, K, d_source) to (B, Q, d_source)."""
        q, k, v = self.query(x).unsqueeze(-3), self.key(source).unsqueeze(-3), source.unsqueeze(-3)
        return Attention(score=Additive(self.weight), mask=mask, offset=0)(q, k, v).squeeze(-3)


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return an `nn.Linear` that preserves variance: weight from N(0, 1 / inputs), bias 0."""
    projection = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device=torch.get_default_device())
    nn.init.normal_(projection.weight, std=1 / math.sqrt(inputs))
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)
    return projection


def project_rows(layer: nn.Module, x: Tensor, first: int, last: int) -> Tensor:
    """Return `layer(x)[..., first:last]`; of an `nn.Linear` without hooks, only these outputs are computed."""
    if type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)):
        return project(x, layer.weight, layer.bias, rows=(first, last))
    return layer(x)[..., first:last]


def check_registered(attend: Attention) -> Attention:
    """Return `attend`; raise if its score function has trainable tensors that are not registered."""
    score = attend.score
    is_closure = isinstance(score, Modified) and not isinstance(score.function, nn.Module)
    if is_closure and score.closes_over_trainable(torch.get_default_device()):
        raise TypeError(
            f"the score function {score!r} uses tensors that require grad but cannot be registered by this module; "
            "write it as an nn.Module with forward(score, b, h, q_index, k_index) that holds them"
        )
    return attend


def with_scale(attend: Attention, d_head: int, layer: type) -> Attention:
    """Return `attend` with the default scale for heads of width `d_head`, for a layer that changes their width."""
    score = attend.score
    if not isinstance(score, Dot):
        raise ValueError(f"{layer.__name__} needs the score Dot(), got {score!r}")
    return attend if score.scale is not None else attend.replace(score=Dot(d_head**-0.5, score.softcap))


def check_width_free(bias: Bias | None) -> None:
    """Raise if a bias depends on queries or values, for a layer that changes their width."""
    for part in () if bias is None else bias.parts():
        if isinstance(part, Shaw) or not is_built_in(part):
            raise ValueError(
                f"the bias {part!r} may depend on queries or values, which this layer rearranges; use another bias"
            )
