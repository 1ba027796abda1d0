"""Short causal convolutions over tokens, as recurrent layers have them in front of their queries, keys and values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over the last `kernel_size` tokens, followed by SiLU.

    weight (channels, kernel_size): the last column is that of the current token.

    >>> import regard as rg, torch
    >>> y, past = rg.nn.ShortConvolution(8, kernel_size=4)(torch.randn(2, 5, 8))
    >>> y.shape, past.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, kernel_size) / math.sqrt(kernel_size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, past: Tensor | None = None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x (B, N, channels) to the same shape; also return the last kernel_size - 1 inputs.

        past: the inputs before x, (B, kernel_size - 1, channels), zero by default.
        positions: positions of packed tokens within their documents, (N,) or (B, N); no token reads another document.
        """
        N, before = x.shape[1], self.weight.shape[1] - 1
        past = x.new_zeros(x.shape[0], before, x.shape[2]) if past is None else past.to(x.dtype)
        inputs, weight = torch.cat((past, x), 1), self.weight.to(x.dtype)
        output = x * weight[:, -1] if self.bias is None else torch.addcmul(self.bias.to(x.dtype), x, weight[:, -1])
        for back in range(1, before + 1):
            earlier = inputs[:, before - back : before - back + N]
            if positions is not None:
                earlier = torch.where((positions >= back)[..., None], earlier, 0)
            output = torch.addcmul(output, earlier, weight[:, -1 - back])
        return F.silu(output), inputs[:, N:]
