"""Feed-forward layers, applied to each token separately."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.attention import linear
from regard.nn.dropout import dropout

Activation = Callable[[Tensor], Tensor]


def quick_gelu(x: Tensor) -> Tensor:
    """`x sigmoid(1.702 x)`, an approximation of GELU that some checkpoints were trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations by the names used in configurations."""


class FeedForward(nn.Module):
    """`down(activation(up(x)))`, (..., d_model) to (..., d_model); weights from N(0, 1 / fan_in), biases 0.

    >>> import regard as rg, torch
    >>> rg.nn.FeedForward(16, 64, activation=torch.relu)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: Activation = F.gelu, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.up, self.output = linear(d_model, d_hidden, bias=bias), linear(d_hidden, d_model, bias=bias)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.up(x))
        if self.dropout and self.training:
            x = dropout(x, self.dropout)
        return self.output(x)


class GatedFeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))`; SwiGLU with SiLU. One weight holds gate and up, in this order.

    >>> import regard as rg, torch
    >>> rg.nn.GatedFeedForward(16, 64)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: Activation = F.silu, dropout: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__()
        self.up, self.output = linear(d_model, 2 * d_hidden, bias=bias), linear(d_hidden, d_model, bias=bias)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        x = self.activation(gate) * up
        if self.dropout and self.training:
            x = dropout(x, self.dropout)
        return self.output(x)
