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


def overlaps(edges: tuple[int, int], count: int, length: int, cells: int) -> Tensor:
    """How much of each of the cells that a length is cut into lies in each band of a window, (count, cells).

    >>> from regard.view.pool import overlaps
    >>> overlaps((1, 4), 1, length=8, cells=4)  # tokens 1, 2 and 3 are half of the first cell and all of the second
    tensor([[0.5000, 1.0000, 0.0000, 0.0000]])
    """
    cut = (edges[0] + torch.arange(count + 1) * (edges[1] - edges[0]) / count) * cells / length
    n = torch.arange(cells)
    return (torch.minimum(cut[1:, None], n + 1) - torch.maximum(cut[:-1, None], n)).clamp(min=0).float()
