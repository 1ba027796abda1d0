"""A correct attention with an online softmax, built of replaceable steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64


def scale_of(width: int, scale: float | None) -> float:
    return width**-0.5 if scale is None else scale


def shared(x: Tensor, heads: int) -> Tensor:
    """Repeat (B, G, K, D) for H query heads."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def visible(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    """The visible entries, broadcast to (B, H, Q, K); the causal mask is aligned at the bottom right."""
    if not causal:
        return mask
    below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return below if mask is None else mask & below


def hide(logits: Tensor, visible_keys: Tensor) -> Tensor:
    return logits.masked_fill(~visible_keys, -math.inf)


def clean_keys(x: Tensor, visible_keys: Tensor | None) -> Tensor:
    """Replace hidden non-finite values, because NaN times 0 is NaN."""
    return x if visible_keys is None else torch.where(x.isfinite(), x, 0.0)


def dropout_factors(dropout: float, shape: tuple[int, ...]) -> Tensor:
    return (torch.rand(shape) >= dropout) / (1 - dropout)


def peak_of(logits: Tensor) -> Tensor:
    return logits.detach().amax(-1, keepdim=True)


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.transpose(-2, -1)


@dataclass(frozen=True)
class Steps:
    scale_of: Callable[..., float] = scale_of
    shared: Callable[..., Tensor] = shared
    visible: Callable[..., Tensor | None] = visible
    hide: Callable[..., Tensor] = hide
    clean_keys: Callable[..., Tensor] = clean_keys
    dropout_factors: Callable[..., Tensor] = dropout_factors
    peak_of: Callable[..., Tensor] = peak_of
    products: Callable[..., Tensor] = products
    shrink_output: bool = True
    shrink_total: bool = True
    least: float = 0.0  # replaces the peak of a row without visible keys
    arithmetic: torch.dtype = torch.float32
    tile: int = TILE


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    steps: Steps = Steps(),
) -> Tensor:
    """softmax(q kᵀ scale) v, one tile of keys after the other."""
    dtype = q.dtype
    arithmetic = torch.float64 if dtype == torch.float64 else steps.arithmetic
    q, k, v = (x.to(arithmetic) for x in (q, k, v))
    visible_keys = steps.visible(mask, causal, q, k)
    visible_keys = None if visible_keys is None else visible_keys.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    k, v = steps.clean_keys(k, visible_keys), steps.clean_keys(v, visible_keys)
    k, v = steps.shared(k, q.shape[1]), steps.shared(v, q.shape[1])
    factor = steps.scale_of(q.shape[-1], scale)
    peak = q.new_full((*q.shape[:-1], 1), -math.inf)
    output, total = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(*q.shape[:-1], 1)
    for start in range(0, k.shape[2], steps.tile):
        tile = slice(start, start + steps.tile)
        logits = steps.products(q, k[:, :, tile], factor)
        if visible_keys is not None:
            logits = steps.hide(logits, visible_keys[..., tile])
        now = torch.maximum(peak, steps.peak_of(logits))
        safe = now.masked_fill(now == -math.inf, steps.least)
        weights, old = (logits - safe).exp(), (peak - safe).exp()
        total = (total * old if steps.shrink_total else total) + weights.sum(-1, keepdim=True)
        if dropout:
            weights = weights * steps.dropout_factors(dropout, tuple(weights.shape)).to(weights)
        output = (output * old if steps.shrink_output else output) + weights @ v[:, :, tile]
        peak = now
    return (output / total.masked_fill(total == 0, 1.0)).to(dtype)
