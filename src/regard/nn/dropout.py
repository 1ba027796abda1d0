"""Dropout of hidden states. On a CPU torch draws one number after the other; here four come out of one draw."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> Tensor:
    """Each element is 0 with probability p, to 1 in 65,536, and divided by 1 - p otherwise. For training only.

    >>> import torch
    >>> from regard.nn.dropout import dropout
    >>> bool(abs((dropout(torch.ones(1000, 1000), 0.1) == 0).float().mean() - 0.1) < 0.01)
    True
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < p < 1:
        return F.dropout(x, p)
    count = x.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits are random
    kept = draws.view(torch.int16)[:count].view(x.shape) >= round(p * 65536) - 32768
    return x * kept.to(x.dtype).mul_(1 / (1 - p))
