"""Dropout of hidden states. On a CPU one 64-bit random number decides four elements, where torch draws one each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 1 << 16  # a draw has 16 bits
FEWEST = 1 << 8  # minimum levels of the rarer outcome; with fewer, rounding changes p by more than 1 in 512


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and multiply the others by 1 / (1 - p). For training only.

    On a CPU, p is rounded to a multiple of 1 / 65,536, also in the factor, so that the mean is preserved. For p so
    close to 0 or 1 that rounding matters, and on other devices, `F.dropout` is used.

    >>> import torch
    >>> from regard.nn.dropout import dropout
    >>> bool(abs((dropout(torch.ones(1000, 1000), 0.1) == 0).float().mean() - 0.1) < 0.01)
    True
    """
    coarse = FEWEST / LEVELS <= p <= 1 - FEWEST / LEVELS
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not coarse:
        return F.dropout(x, p)
    count, threshold = x.numel(), round(p * LEVELS)
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits are random
    kept = draws.view(torch.int16)[:count].view(x.shape) >= threshold - LEVELS // 2
    return (x * kept).mul_(LEVELS / (LEVELS - threshold))
