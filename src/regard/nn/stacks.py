"""Stacks of blocks: encoders and decoders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.masks import Mask
from regard.nn.attention import MultiHeadAttention
from regard.nn.blocks import Block
from regard.nn.cache import Cache, CrossCache
from regard.nn.context import LayerContext, check_not_in_context
from regard.positions import Bias, t5
from regard.sharding import current_sharding


class RelativeBias(nn.Module):
    """T5's bias as a part of a stack: one table for all layers, (buckets, heads), from N(0, 1 / buckets).

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


class Encoder(nn.Module):
    """Blocks one after the other, and a last norm if there is one. Decoder-only models are encoders of causal blocks.

    layers: blocks; each runs `repeat` times before the next (ALBERT's single layer runs twelve times).
    norm: applied last. bias: a module that gives one bias for all layers.
    checkpointing: in training, keep only what enters a block, and compute the rest again in backward.

    What attention and feed-forward add is divided by the square root of how many are added up, in the weight of their
    output or of the norm behind it, unless a norm comes after the sum: so activations keep a variance of O(1) at any
    depth.

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
        repeat: int = 1,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.layers, self.norm, self.bias = nn.ModuleList(layers), norm, bias
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
        cache: Sequence[Cache] | None = None,
    ) -> Tensor:
        """(B, N, d_model) to the same; `context` stands for a mask, bias or positions.

        cache: as `cache()` gives them. The tokens of x come after those that they have seen.
        """
        if context is None:
            context = LayerContext(mask)
        else:
            check_not_in_context(mask=mask)
        if (sharding := None if context.is_local else current_sharding()) is not None:
            x, context = sharding.to_local(x, 1), context.to_local()
        if self.bias is not None:
            context = context.with_bias(self.bias())
        recompute = self._recomputes(cache)
        for n, layer in enumerate(self._runs()):
            if recompute:
                x = checkpoint(layer, x, context=context, use_reentrant=False)
            else:
                x = layer(x, context=context, cache=None if cache is None else cache[n])
        x = x if self.norm is None else self.norm(x)
        return x if sharding is None else sharding.full_tensor(x, 1)

    def cache(self) -> list[Cache]:
        """Empty caches, one for each layer and each time that it runs, each as its attention needs it."""
        return [self._attention(block).cache() for block in self._runs()]

    def _runs(self) -> Iterator[nn.Module]:
        """The layers in the order in which they run, each `repeat` times."""
        return (layer for layer in self.layers for _ in range(self.repeat))

    def _recomputes(self, cache: Sequence[object] | None) -> bool:
        """Whether blocks are computed again in backward; raise if the caches do not fit that, or the layers."""
        recompute = self.checkpointing and self.training and torch.is_grad_enabled()
        if cache is None:
            return recompute
        if recompute:
            raise ValueError(
                "checkpointing computes blocks again in backward, which would append to the caches again; decode in "
                "eval mode or under torch.no_grad(), or train without caches"
            )
        needed, different = len(self.layers) * self.repeat, len(set(map(id, cache)))
        if not len(cache) == different == needed:
            raise ValueError(
                f"cache must be {needed} different ones, one for each layer and each time that it runs, but "
                f"{len(cache)} came, of which {different} are different; take those that `cache()` gives"
            )
        return False

    def _attention(self, block: nn.Module) -> MultiHeadAttention:
        attention = block.attention
        if not isinstance(attention, MultiHeadAttention):
            raise TypeError(
                f"only blocks of MultiHeadAttention have caches, but this one has {type(attention).__name__}"
            )
        return attention


@dataclass(frozen=True, eq=False)
class DecoderCache:
    """Keys and values of a decoder's own tokens, and of the source: one of each for every run of a layer."""

    self_attention: list[Cache]
    cross_attention: list[CrossCache]

    @property
    def holds_source(self) -> bool:
        """Whether a call was made, so that the source need not be given again."""
        return all(cross_cache.keys_values is not None for cross_cache in self.cross_attention)


class Decoder(Encoder):
    """Blocks with cross-attention: they look at themselves and at a source.

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
        """x (B, N, d_model), source (B, K, d_source). With a cache, the source is needed at the first call only."""
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
        recompute = self._recomputes(None if cache is None else cache.self_attention)
        for n, layer in enumerate(self._runs()):
            if recompute:
                x = checkpoint(layer, x, source, context=context, cross_context=cross_context, use_reentrant=False)
            elif cache is None:
                x = layer(x, source, context=context, cross_context=cross_context)
            else:
                cross_cache = cache.cross_attention[n]
                # compared with what is held once, not by all
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

    def cache(self) -> DecoderCache:  # type: ignore[override]
        """An empty cache."""
        return DecoderCache(super().cache(), [CrossCache() for _ in self._runs()])
