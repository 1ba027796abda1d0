"""Pooling weights to bands: the mean over queries of the sum over keys, so that rows of mass still sum to 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bands(length: int, count: int) -> tuple[Tensor, Tensor]:
    """Starts and stops of the bands of adaptive_avg_pool2d: neighbours share a place where lengths do not divide.

    >>> from regard.view.pool import bands
    >>> bands(10, 4)
    (tensor([0, 2, 5, 7]), tensor([ 3,  5,  8, 10]))
    """
    n = torch.arange(count)
    return n * length // count, -(-(n + 1) * length // count)


def pooled_columns(x: Tensor, count: int) -> Tensor:
    """Sums over bands of keys, cut at floor(n * K / count): (..., K) to (..., count)."""
    if count == x.shape[-1]:
        return x
    edge = torch.arange(count + 1) * x.shape[-1] // count
    if x.shape[-1] % count == 0:
        return x.unflatten(-1, (count, -1)).sum(-1)
    which = torch.repeat_interleave(torch.arange(count), edge.diff())
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, which, x)


def pooled_rows(x: Tensor, count: int) -> Tensor:
    """Means over bands of queries: (..., Q, n) to (..., count, n)."""
    if count == x.shape[-2]:
        return x
    return F.adaptive_avg_pool1d(x.mT.flatten(0, -2), count).unflatten(0, x.mT.shape[:-1]).mT
