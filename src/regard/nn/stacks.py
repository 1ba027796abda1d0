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
from regard.nn.cache import Cache, Memory
from regard.nn.shared import Shared, check_unshared
from regard.positions import Bias, t5
from regard.sharding import sharding


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
            self._shrink()

    def _shrink(self) -> None:
        names = [name for name in ("attention", "cross", "feedforward") if getattr(self.layers[0], name) is not None]
        share = 1 / math.sqrt(len(names) * len(self.layers) * self.repeat)
        for block in self.layers:
            for name in names:
                getattr(block, f"{name}_residual").shrink(getattr(block, name), share)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        shared: Shared | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """(B, N, d_model) to the same; `shared` stands for a mask, bias or positions.

        caches: as `caches()` gives them. The tokens of x come after those that they have seen.
        """
        if shared is None:
            shared = Shared(mask)
        else:
            check_unshared(mask=mask)
        if (together := None if shared.parted else sharding()) is not None:
            x, shared = together.own(x, 1), shared.own()
        if self.bias is not None:
            shared = shared.biased(self.bias())
        recompute = self._recomputes(caches)
        for n, layer in enumerate(self._runs()):
            if recompute:
                x = checkpoint(layer, x, shared=shared, use_reentrant=False)
            else:
                x = layer(x, shared=shared, cache=None if caches is None else caches[n])
        x = x if self.norm is None else self.norm(x)
        return x if together is None else together.whole(x, 1)

    def caches(self) -> list[Cache]:
        """Empty caches, one for each layer and each time that it runs, each as its attention needs it."""
        return [self._attention(block).cache() for block in self._runs()]

    def _runs(self) -> Iterator[nn.Module]:
        """The layers in the order in which they run, each `repeat` times."""
        return (layer for layer in self.layers for _ in range(self.repeat))

    def _recomputes(self, caches: Sequence[object] | None) -> bool:
        """Whether blocks are computed again in backward; raise if the caches do not fit that, or the layers."""
        recompute = self.checkpointing and self.training and torch.is_grad_enabled()
        if caches is None:
            return recompute
        if recompute:
            raise ValueError(
                "checkpointing computes blocks again in backward, which would append to the caches again; decode in "
                "eval mode or under torch.no_grad(), or train without caches"
            )
        needed, different = len(self.layers) * self.repeat, len(set(map(id, caches)))
        if not len(caches) == different == needed:
            raise ValueError(
                f"caches must be {needed} different ones, one for each layer and each time that it runs, but "
                f"{len(caches)} came, of which {different} are different; take those that `caches()` gives"
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

    own: list[Cache]
    source: list[Memory]

    @property
    def holds_source(self) -> bool:
        """Whether a call was made, so that the source need not be given again."""
        return all(memory.kept is not None for memory in self.source)


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
        shared: Shared | None = None,
        across: Shared | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """x (B, N, d_model), source (B, K, d_source). With a cache, the source is needed at the first call only."""
        if shared is None:
            shared = Shared(mask)
        else:
            check_unshared(mask=mask)
        if across is None:
            across = Shared(source_mask)
        else:
            check_unshared(source_mask=source_mask)
        if (together := None if shared.parted else sharding()) is not None:
            x, shared, across = together.own(x, 1), shared.own(), across.own()
            source = None if source is None else together.own(source, 1)
        if self.bias is not None:
            shared = shared.biased(self.bias())
        recompute = self._recomputes(None if cache is None else cache.own)
        for n, layer in enumerate(self._runs()):
            if recompute:
                x = checkpoint(layer, x, source, shared=shared, across=across, use_reentrant=False)
            elif cache is None:
                x = layer(x, source, shared=shared, across=across)
            else:
                memory = cache.source[n]
                given = source if n == 0 or memory.kept is None else None  # compared with what is held once, not by all
                x = layer(x, given, shared=shared, across=across, cache=cache.own[n], memory=memory)
        x = x if self.norm is None else self.norm(x)
        return x if together is None else together.whole(x, 1)

    def cache(self) -> DecoderCache:
        """An empty cache."""
        return DecoderCache(self.caches(), [Memory() for _ in self._runs()])
