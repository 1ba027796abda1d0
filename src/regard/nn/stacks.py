"""Stacks of blocks: encoders and decoders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention import INTERVENTION
from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block
from regard.nn.cache import CrossCache
from regard.nn.context import LayerContext, RelativePositions, check_not_in_context
from regard.nn.fused_stack import run_fused
from regard.nn.latent_attention import LatentAttention
from regard.nn.recurrent import LayerCache
from regard.positions import Bias, t5
from regard.sharding import current_sharding


class RelativeBias(nn.Module):
    """T5's relative position bias: one table (buckets, heads) for all layers of a stack, from N(0, 1 / buckets).

    >>> import regard as rg
    >>> rg.nn.RelativeBias(heads=8)()
    t5((32, 8), bidirectional=True, max_distance=128)
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(buckets, heads) / math.sqrt(buckets))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self) -> Bias:
        return t5(self.table, bidirectional=self.bidirectional, max_distance=self.max_distance)


class RelativeEmbedding(nn.Module):
    """DeBERTa's vectors of relative positions: 2 * span rows, normalised, for all layers of a stack.

    The vector of query i and key j is that of the distance i - j. Distances up to span / 2 have their own vectors, and
    larger ones up to `max_distance` share them on a logarithmic scale; unless max_distance is above span, distances
    are clipped. Vectors start from N(0, 1 / d_model). span is at least 2.

    >>> import regard as rg, torch
    >>> rg.nn.RelativeEmbedding(16, span=4, max_distance=4)(3).rows
    tensor([[4, 3, 2],
            [5, 4, 3],
            [6, 5, 4]])
    """

    def __init__(
        self, d_model: int, *, span: int, max_distance: int, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        if span < 2:
            raise ValueError(f"span must be at least 2, got {span}")
        self.table, self.norm = nn.Parameter(torch.randn(2 * span, d_model) / math.sqrt(d_model)), norm(d_model)
        self.span, self.max_distance = span, max_distance

    def forward(self, length: int) -> RelativePositions:
        """Return the vectors and their rows for self-attention of `length` tokens."""
        indices = torch.arange(length, device=self.table.device)
        distances = indices[:, None] - indices
        if self.max_distance > self.span:
            middle = self.span // 2
            # in float32, as DeBERTa was trained: a distance on the edge of two vectors must take the same one
            largest = torch.tensor((self.max_distance - 1) / middle, dtype=torch.float32, device=distances.device)
            share = torch.log(distances.abs().clamp(min=1).float() / middle) / torch.log(largest)
            far = (torch.ceil(share * (middle - 1)) + middle).long() * distances.sign()
            distances = torch.where(distances.abs() <= middle, distances, far)
        return RelativePositions(self.norm(self.table), (distances + self.span).clamp(0, 2 * self.span - 1))


class Encoder(nn.Module):
    """A stack of blocks with an optional final norm. A decoder-only model is an encoder with causal blocks.

    layers: the blocks; each runs `repeat` times before the next one (ALBERT runs a single layer twelve times).
    norm: applied to the output of the last block. bias: a module that returns one bias for all layers.
    relative: a module that returns the `RelativePositions` of a length, such as `RelativeEmbedding`.
    checkpointing: in training, keep only the inputs of blocks and recompute the rest in backward.

    Unless a norm follows the residual sum, the initial outputs of the sublayers are divided by the square root of
    their number (in the output weight, or in the weight of the norm after it), so that activations keep a variance of
    O(1) at any depth.

    >>> import regard as rg, torch
    >>> def block():
    ...     parts = rg.nn.MultiHeadAttention(16, heads=2), rg.nn.FeedForward(16, 64)
    ...     return rg.nn.Block(*parts, residual=lambda: rg.nn.PreNorm(16))
    >>> encoder = rg.nn.Encoder([block() for _ in range(3)], norm=torch.nn.LayerNorm(16))
    >>> encoder(torch.randn(2, 5, 16), mask=rg.padding([5, 3])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        layers: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        bias: nn.Module | None = None,
        relative: nn.Module | None = None,
        repeat: int = 1,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.layers, self.norm, self.bias, self.relative = nn.ModuleList(layers), norm, bias, relative
        self.repeat, self.checkpointing = repeat, checkpointing
        if self.layers:
            self._scale_outputs()

    def _scale_outputs(self) -> None:
        names = [name for name in ("attention", "cross", "feedforward") if getattr(self.layers[0], name) is not None]
        share = 1 / math.sqrt(len(names) * len(self.layers) * self.repeat)
        for block in self.layers:
            for name in names:
                getattr(block, f"{name}_residual").scale_output(getattr(block, name), share)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        context: LayerContext | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Map (B, N, d_model) to (B, N, d_model).

        context: replaces `mask`; it can also hold a bias and positions.
        cache: from `cache()`, one per layer. The tokens of x follow the cached ones.
        """
        if context is None:
            context = LayerContext(mask)
        else:
            check_not_in_context(mask=mask)
        if (sharding := None if context.is_local else current_sharding()) is not None:
            x, context = sharding.to_local(x, 1), context.to_local()
        if self.bias is not None:
            context = context.with_bias(self.bias())
        if self.relative is not None:
            context = context.with_relative(self.relative(x.shape[1]))
        recompute = self._recomputes(cache)
        compiling = torch.compiler.is_compiling()
        fused = None if compiling else run_fused(self, lambda: list(self._runs()), x, context, cache)
        for n, layer in enumerate(self._runs() if fused is None else ()):
            if recompute:
                x = checkpoint(layer, x, context=context, use_reentrant=False)
            else:
                x = layer(x, context=context, cache=None if cache is None else cache[n])
        x = x if fused is None else fused
        x = x if self.norm is None else self.norm(x)
        return x if sharding is None else sharding.full_tensor(x, 1)

    def cache(self, *, dtype: torch.dtype | None = None) -> list[LayerCache]:
        """Return empty caches, one per run of a layer.

        dtype: `torch.bfloat16`, `torch.float16` or `torch.int8` to store keys and values in fewer bytes, see `Cache`;
            recurrent layers keep their state as it is.
        """
        return [self._cache(block, dtype) for block in self._runs()]

    def _runs(self) -> Iterator[nn.Module]:
        """Iterate over the layers in execution order, each `repeat` times."""
        return (layer for layer in self.layers for _ in range(self.repeat))

    def _recomputes(self, cache: Sequence[object] | None) -> bool:
        """Return whether blocks are recomputed in backward, after checking the caches."""
        recompute = self.checkpointing and self.training and torch.is_grad_enabled()
        if cache is None:  # an ablation may have ended before backward
            return recompute and (torch.compiler.is_compiling() or INTERVENTION.get() is None)
        if recompute:
            raise ValueError(
                "checkpointing recomputes blocks in backward, which would append to the caches twice; decode in "
                "eval mode or under torch.no_grad(), or train without caches"
            )
        needed, distinct = len(self.layers) * self.repeat, len(set(map(id, cache)))
        if not len(cache) == distinct == needed:
            raise ValueError(
                f"cache must hold {needed} distinct caches, one per run of a layer, got {len(cache)}, of which "
                f"{distinct} are distinct; use the ones that `cache()` returns"
            )
        return False

    def _cache(self, block: nn.Module, dtype: torch.dtype | None) -> LayerCache:
        attention = block.attention
        if not hasattr(attention, "cache"):
            raise TypeError(
                "only blocks with MultiHeadAttention or a recurrent layer have caches, but this block has "
                f"{type(attention).__name__}"
            )
        if isinstance(attention, MultiHeadAttention | LatentAttention):
            return attention.cache(dtype=dtype)
        return attention.cache()  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """Self-attention and cross-attention caches of a decoder, one of each per run of a layer."""

    self_attention: list[LayerCache]
    cross_attention: list[CrossCache]

    @property
    def holds_source(self) -> bool:
        """Whether the keys and values of the source are cached, so that later calls can omit the source."""
        return all(cross_cache.keys_values is not None for cross_cache in self.cross_attention)


class Decoder(Encoder):
    """A stack of blocks with cross-attention to a source.

    >>> import regard as rg, torch
    >>> def block():
    ...     own = rg.nn.MultiHeadAttention(16, heads=2, attend=rg.Attention(mask=rg.causal()))
    ...     cross = rg.nn.MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0))
    ...     return rg.nn.Block(own, rg.nn.FeedForward(16, 64), cross=cross, residual=lambda: rg.nn.PostNorm(16))
    >>> decoder = rg.nn.Decoder([block() for _ in range(2)])
    >>> decoder(torch.randn(2, 5, 16), torch.randn(2, 7, 16), source_mask=rg.padding([7, 4])).shape
    torch.Size([2, 5, 16])
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        source_mask: Mask | Tensor | None = None,
        context: LayerContext | None = None,
        cross_context: LayerContext | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Map x (B, N, d_model) and source (B, K, d_source) to (B, N, d_model).

        With a cache, the source is required in the first call only.
        """
        if context is None:
            context = LayerContext(mask)
        else:
            check_not_in_context(mask=mask)
        if cross_context is None:
            cross_context = LayerContext(source_mask)
        else:
            check_not_in_context(source_mask=source_mask)
        if (sharding := None if context.is_local else current_sharding()) is not None:
            x, context, cross_context = sharding.to_local(x, 1), context.to_local(), cross_context.to_local()
            source = None if source is None else sharding.to_local(source, 1)
        if self.bias is not None:
            context = context.with_bias(self.bias())
        if self.relative is not None:
            context = context.with_relative(self.relative(x.shape[1]))
        recompute = self._recomputes(None if cache is None else cache.self_attention)
        for n, layer in enumerate(self._runs()):
            if recompute:
                x = checkpoint(layer, x, source, context=context, cross_context=cross_context, use_reentrant=False)
            elif cache is None:
                x = layer(x, source, context=context, cross_context=cross_context)
            else:
                cross_cache = cache.cross_attention[n]
                # comparing the source with the cached one is slow: only the first layer does it
                given = source if n == 0 or cross_cache.keys_values is None else None
                x = layer(
                    x,
                    given,
                    context=context,
                    cross_context=cross_context,
                    cache=cache.self_attention[n],
                    cross_cache=cross_cache,
                )
        x = x if self.norm is None else self.norm(x)
        return x if sharding is None else sharding.full_tensor(x, 1)

    def cache(self, *, dtype: torch.dtype | None = None) -> DecoderCache:  # type: ignore[override]
        """Return an empty cache; `dtype` is that of the self-attention's, see `Cache`."""
        return DecoderCache(super().cache(dtype=dtype), [CrossCache() for _ in self._runs()])
