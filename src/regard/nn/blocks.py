"""A block: attention and feed-forward, each within a residual arrangement that is given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.cache import Cache, CrossCache
from regard.nn.context import LayerContext, check_not_in_context
from regard.nn.dropout import dropout

Norm = Callable[[int], nn.Module]
"""Makes a norm of a width, such as `nn.LayerNorm`, `nn.RMSNorm`, or a `partial` of one with another eps."""


class UnitRMSNorm(nn.Module):
    """RMS norm that multiplies by `1 + weight`, with weights that start from 0 (Gemma).

    >>> import regard as rg, torch
    >>> rg.nn.UnitRMSNorm(8)(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)  # in bfloat16, 1 + weight would lose small weights
        return F.rms_norm(x.to(dtype), self.weight.shape, 1 + self.weight.to(dtype), self.eps).to(x.dtype)


class Residual(nn.Module):
    """How a sublayer is added to what it reads; `dropout` is applied to what it adds, in training."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def apply_dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout) if self.dropout and self.training else x

    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        """Multiply what a fresh sublayer adds by a share, so that many add up to O(1); nothing where a norm follows."""

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class PreNorm(Residual):
    """`x + sublayer(norm(x))`.

    >>> import regard as rg, torch
    >>> rg.nn.PreNorm(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm = norm(d_model)

    @torch.no_grad()
    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        if isinstance(output := getattr(sublayer, "output", None), nn.Linear):
            output.weight *= share

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(sublayer(self.norm(x), *args, **kwargs))


class PostNorm(Residual):
    """`norm(x + sublayer(x))`.

    >>> import regard as rg, torch
    >>> rg.nn.PostNorm(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm = norm(d_model)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return self.norm(x + self.apply_dropout(sublayer(x, *args, **kwargs)))


class SandwichNorm(Residual):
    """`x + after(sublayer(norm(x)))`: a norm on both sides (Gemma 2).

    >>> import regard as rg, torch
    >>> rg.nn.SandwichNorm(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm, self.after = norm(d_model), norm(d_model)

    @torch.no_grad()
    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        assert isinstance(self.after.weight, Tensor)
        self.after.weight.fill_(share - 1 if isinstance(self.after, UnitRMSNorm) else share)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(self.after(sublayer(self.norm(x), *args, **kwargs)))


class Block(nn.Module):
    """Self-attention, cross-attention if there is one, feed-forward; `residual()` makes the arrangement of each.

    >>> import regard as rg, torch
    >>> block = rg.nn.Block(
    ...     rg.nn.MultiHeadAttention(16, heads=2), rg.nn.FeedForward(16, 64), residual=lambda: rg.nn.PreNorm(16)
    ... )
    >>> block(torch.randn(2, 5, 16), mask=rg.causal()).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        *,
        residual: Callable[[], Residual],
        cross: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.attention_residual = attention, residual()
        self.cross, self.cross_residual = cross, None if cross is None else residual()
        self.feedforward, self.feedforward_residual = feedforward, residual()

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        mask: Any = None,
        source_mask: Any = None,
        context: LayerContext | None = None,
        cross_context: LayerContext | None = None,
        cache: Cache | None = None,
        cross_cache: CrossCache | None = None,
    ) -> Tensor:
        """x (B, N, d_model), source (B, K, d_source); `context` and `cross_context` stand for the masks in a stack."""
        if context is None:
            context = LayerContext(mask).to_local()
        else:
            check_not_in_context(mask=mask)
        if self.cross is None and any(part is not None for part in (source, source_mask, cross_context, cross_cache)):
            raise ValueError("the block has no cross-attention, so it takes no source; give it `cross=`")
        x = self.attention_residual(x, self.attention, context=context, cache=cache)
        if self.cross is not None and self.cross_residual is not None:
            if source is None and cross_cache is None:
                raise ValueError("the cross-attention of the block needs a source")
            if cross_context is None:
                cross_context = LayerContext(source_mask).to_local()
            else:
                check_not_in_context(source_mask=source_mask)
            x = self.cross_residual(x, self.cross, source, context=cross_context, cache=cross_cache)
        return self.feedforward_residual(x, self.feedforward)
