"""Bands: what a cell of a pooled map is the mean of. `static/levels.js` has the same rule.

Band n of N over a length L goes from floor(n L / N) to ceil((n + 1) L / N), as in adaptive_avg_pool2d: neighbours share
one place where N does not divide L. A cell is the mean of all weights of its rows and columns, so a cell of one row and
one column is a weight, and equal weights give equal cells.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bands(length: int, count: int) -> Tensor:
    """From and to of each band, (count, 2).

    >>> from regard.view.pool import bands
    >>> bands(10, 4).tolist()
    [[0, 3], [2, 5], [5, 8], [7, 10]]
    """
    n = torch.arange(count)
    return torch.stack([n * length // count, -(-(n + 1) * length // count)], -1)


def pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The means of bands of rows and columns, (..., Q, K) to (..., *size); a smaller axis stays as it is."""
    size = (min(size[0], x.shape[-2]), min(size[1], x.shape[-1]))
    if size == x.shape[-2:]:
        return x
    return F.adaptive_avg_pool2d(x.flatten(0, -3) if x.dim() > 3 else x, size).reshape(*x.shape[:-2], *size)
