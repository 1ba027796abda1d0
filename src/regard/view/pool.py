"""Pool maps of weights to means over bands of rows and columns; `static/levels.js` follows the same rule.

Band n of N over a length L is the range floor(n L / N) ... ceil((n + 1) L / N), as in adaptive_avg_pool2d: neighbouring
bands overlap by one where N does not divide L. A cell of one row and one column is an exact weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bands(length: int, count: int) -> Tensor:
    """Return start and stop of each band, (count, 2).

    >>> from regard.view.pool import bands
    >>> bands(10, 4).tolist()
    [[0, 3], [2, 5], [5, 8], [7, 10]]
    """
    n = torch.arange(count)
    return torch.stack([n * length // count, -(-(n + 1) * length // count)], -1)


def pool(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Average (..., Q, K) over bands to (..., *size); an axis that is already smaller is kept."""
    size = (min(size[0], x.shape[-2]), min(size[1], x.shape[-1]))
    if size == x.shape[-2:]:
        return x
    return F.adaptive_avg_pool2d(x.flatten(0, -3) if x.dim() > 3 else x, size).reshape(*x.shape[:-2], *size)
