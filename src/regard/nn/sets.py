"""Set Transformer layers: blocks with induced points, and pooling by attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.nn.blocks import Residual
from regard.nn.context import LayerContext, key_mask
from regard.nn.packing import Packed
from regard.sharding import current_sharding


class CrossBlock(nn.Module):
    """Cross-attention and feed-forward, each wrapped in a new `residual()`.

    >>> import regard as rg, torch
    >>> block = rg.nn.CrossBlock(
    ...     rg.nn.MultiHeadAttention(16, heads=2), rg.nn.FeedForward(16, 64), residual=lambda: rg.nn.PostNorm(16)
    ... )
    >>> block(torch.randn(2, 3, 16), torch.randn(2, 7, 16)).shape
    torch.Size([2, 3, 16])
    """

    def __init__(self, cross: nn.Module, feedforward: nn.Module, *, residual: Callable[[], Residual]) -> None:
        super().__init__()
        self.cross, self.cross_residual = cross, residual()
        self.feedforward, self.feedforward_residual = feedforward, residual()

    def forward(self, x: Tensor, source: Tensor, *, cross_context: LayerContext | None = None) -> Tensor:
        """Map x (B, Q, d_model) and source (B, K, d_source) to (B, Q, d_model)."""
        cross_context = LayerContext() if cross_context is None else cross_context
        if (sharding := None if cross_context.is_local else current_sharding()) is not None:
            x, source, cross_context = sharding.to_local(x, 1), sharding.to_local(source, 1), cross_context.to_local()
        x = self.cross_residual(x, self.cross, source, context=cross_context)
        x = self.feedforward_residual(x, self.feedforward)
        return x if sharding is None else sharding.full_tensor(x, 1)


class SeedPooling(nn.Module):
    """Pooling of sets by attention from learned seeds: (B, N, d_model) or packed to (B, seeds, d_model).

    block: a `CrossBlock` whose attention has `offset=0`. Seeds start from N(0, 1).

    >>> import regard as rg, torch
    >>> attention = rg.nn.MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0))
    >>> block = rg.nn.CrossBlock(attention, rg.nn.FeedForward(16, 64), residual=lambda: rg.nn.PostNorm(16))
    >>> rg.nn.SeedPooling(16, 3, block)(rg.pack([torch.randn(5, 16), torch.randn(2, 16)])).shape
    torch.Size([2, 3, 16])
    """

    def __init__(self, d_model: int, seeds: int, block: CrossBlock) -> None:
        super().__init__()
        self.seeds, self.block = nn.Parameter(torch.randn(seeds, d_model)), block

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        if isinstance(x, Packed):
            if mask is not None:
                raise ValueError("packed sets take no mask: their lengths are known; omit `mask`")
            seeds = repeat_points(self.seeds, x)
            pooled = self.block(seeds.values[None], x.values[None], cross_context=LayerContext(seeds.cross_mask(x)))
            return pooled.view(len(x), *self.seeds.shape)
        return self.block(self.seeds.expand(len(x), -1, -1), x, cross_context=LayerContext(key_mask(mask, x)))


class ProbePooling(nn.Module):
    """Pooling by attention from one learned probe, followed by a feed-forward layer: (B, N, d_model) to (B, d_model).

        x = attention(probe, tokens);  x = residual(x, feedforward)        (SigLIP)

    attention: with `offset=0`. The probe starts from N(0, 1).

    >>> import regard as rg, torch
    >>> attention = rg.nn.MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0))
    >>> rg.nn.ProbePooling(16, attention, rg.nn.FeedForward(16, 64), rg.nn.PreNorm(16))(torch.randn(2, 5, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(self, d_model: int, attention: nn.Module, feedforward: nn.Module, residual: Residual) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, d_model))
        self.attention, self.feedforward, self.residual = attention, feedforward, residual

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        context = LayerContext(key_mask(mask, x)).to_local()
        pooled = self.attention(self.probe.expand(len(x), -1, -1), x, context=context)
        return self.residual(pooled, self.feedforward)[:, 0]


class InducedBlock(nn.Module):
    """Self-attention of a set through a few learned points, in O(N · points) instead of O(N^2).

        gathered = gather(points, x)        points attend to the set
        x        = spread(x, gathered)      the set attends to the points

    gather, spread: blocks whose attention has `offset=0`. Sets are (B, N, d_model) with a (B, N) mask, or packed; the
    result has the same form. Points start from N(0, 1).

    >>> import regard as rg, torch
    >>> def block():
    ...     attention = rg.nn.MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0))
    ...     return rg.nn.CrossBlock(attention, rg.nn.FeedForward(16, 64), residual=lambda: rg.nn.PostNorm(16))
    >>> rg.nn.InducedBlock(16, 4, block(), block())(torch.randn(2, 9, 16)).shape
    torch.Size([2, 9, 16])
    """

    def __init__(self, d_model: int, points: int, gather: CrossBlock, spread: CrossBlock) -> None:
        super().__init__()
        self.gather, self.spread = SeedPooling(d_model, points, gather), spread

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor | Packed:
        gathered = self.gather(x, mask)  # (B, points, d_model)
        if isinstance(x, Packed):
            points = Packed(gathered.flatten(0, 1), (gathered.shape[1],) * len(x))
            return x.with_values(
                self.spread(x.values[None], points.values[None], cross_context=LayerContext(x.cross_mask(points)))[0]
            )
        return self.spread(x, gathered)


def repeat_points(points: Tensor, sets: Packed) -> Packed:
    """Repeat the points (n, d_model) for each of the sets."""
    return Packed(points.repeat(len(sets), 1), (len(points),) * len(sets))
