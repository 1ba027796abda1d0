"""Transformer blocks: attention and feed-forward sublayers with a choice of residual arrangements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.cache import CrossCache
from regard.nn.context import LayerContext, check_not_in_context
from regard.nn.dropout import dropout
from regard.nn.recurrent import LayerCache

Norm = Callable[[int], nn.Module]
"""A factory of norms by width, such as `nn.LayerNorm`, `nn.RMSNorm`, or a `partial` of one with another eps."""


class UnitRMSNorm(nn.Module):
    """RMS norm with gain `1 + weight`, where weight starts from 0 (Gemma).

    >>> import regard as rg, torch
    >>> rg.nn.UnitRMSNorm(8)(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)  # in bfloat16, 1 + weight rounds small weights away
        return F.rms_norm(x.to(dtype), self.weight.shape, 1 + self.weight.to(dtype), self.eps).to(x.dtype)


class Residual(nn.Module):
    """Base class: adds the output of a sublayer to its input, with `dropout` on that output in training."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def apply_dropout(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout) if self.dropout and self.training else x

    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        """Scale the initial output of a sublayer by `share`; a no-op in arrangements that end in a norm."""

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
        output = getattr(sublayer, "output", None)
        weight = output.weight if isinstance(output, nn.Linear) else output
        if isinstance(weight, nn.Parameter):
            weight.mul_(share)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(sublayer(self.norm(x), *args, **kwargs))


class LayerScale(PreNorm):
    """`x + scale * sublayer(norm(x))`, with a learned scale per channel (CaiT, DINOv2).

    >>> import regard as rg, torch
    >>> rg.nn.LayerScale(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(d_model, norm, dropout)
        self.scale = nn.Parameter(torch.ones(d_model))

    @torch.no_grad()
    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        self.scale.fill_(share)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(sublayer(self.norm(x), *args, **kwargs) * self.scale)


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


class OutputNorm(Residual):
    """`x + norm(sublayer(x))`: only the output of the sublayer is normalised (OLMo 2).

    >>> import regard as rg, torch
    >>> rg.nn.OutputNorm(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm = norm(d_model)

    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        _set_gain(self.norm, share)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(self.norm(sublayer(x, *args, **kwargs)))


class SandwichNorm(Residual):
    """`x + after(sublayer(norm(x)))`: a norm on both sides (Gemma 2).

    >>> import regard as rg, torch
    >>> rg.nn.SandwichNorm(8)(torch.ones(2, 8), lambda x: x).shape
    torch.Size([2, 8])
    """

    def __init__(self, d_model: int, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.norm, self.after = norm(d_model), norm(d_model)

    def scale_output(self, sublayer: nn.Module, share: float) -> None:
        _set_gain(self.after, share)

    def forward(self, x: Tensor, sublayer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return x + self.apply_dropout(self.after(sublayer(self.norm(x), *args, **kwargs)))


@torch.no_grad()
def _set_gain(norm: nn.Module, gain: float) -> None:
    assert isinstance(norm.weight, Tensor)
    norm.weight.fill_(gain - 1 if isinstance(norm, UnitRMSNorm) else gain)


class Block(nn.Module):
    """Self-attention, optional cross-attention and feed-forward, each wrapped in a new `residual()`.

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
        cache: LayerCache | None = None,
        cross_cache: CrossCache | None = None,
    ) -> Tensor:
        """Map x (B, N, d_model) and source (B, K, d_source) to (B, N, d_model).

        context, cross_context: replace `mask` and `source_mask` inside a stack.
        """
        if context is None:
            context = LayerContext(mask).to_local()
        else:
            check_not_in_context(mask=mask)
        if self.cross is None and any(part is not None for part in (source, source_mask, cross_context, cross_cache)):
            raise ValueError("this block has no cross-attention and takes no source; construct it with `cross=`")
        x = self.attention_residual(x, self.attention, context=context, cache=cache)
        if self.cross is not None and self.cross_residual is not None:
            if source is None and cross_cache is None:
                raise ValueError(
                    "this block has cross-attention and needs a source; pass `source` or a filled `cross_cache`"
                )
            if cross_context is None:
                cross_context = LayerContext(source_mask).to_local()
            else:
                check_not_in_context(source_mask=source_mask)
            x = self.cross_residual(x, self.cross, source, context=cross_context, cache=cross_cache)
        return self.feedforward_residual(x, self.feedforward)
