"""Mixtures of experts: feed-forward layers of which each token uses a few."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.engines.packed_linear import project
from regard.nn.attention import linear
from regard.nn.feedforward import Activation


class Experts(nn.Module):
    """A mixture of gated feed-forward layers, (..., d_model) to (..., d_model).

        chosen, logits = top `per_token` of router(x)
        output         = sum over chosen of softmax(logits) * expert(x)

    An expert is `down(activation(gate(x)) * up(x))`. With a `limit`, gate is at most `limit`, up is clamped to
    [-limit, limit], and the product is with up + 1 (gpt-oss). `up` (count, 2 * d_hidden, d_model) holds the weights of
    gate and up, in this order, `output` (count, d_model, d_hidden) those of down. Weights start from N(0, 1 / fan_in),
    biases from 0.

    >>> import regard as rg, torch
    >>> rg.nn.Experts(16, 32, count=4, per_token=2)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        count: int,
        per_token: int,
        activation: Activation = F.silu,
        limit: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= per_token <= count:
            raise ValueError(f"per_token must be between 1 and the {count} experts, got {per_token}")
        self.count, self.per_token, self.activation, self.limit = count, per_token, activation, limit
        self.router = linear(d_model, count, bias=bias)
        self.up = nn.Parameter(torch.randn(count, 2 * d_hidden, d_model) / math.sqrt(d_model))
        self.output = nn.Parameter(torch.randn(count, d_model, d_hidden) / math.sqrt(d_hidden))
        self.up_bias = nn.Parameter(torch.zeros(count, 2 * d_hidden)) if bias else None
        self.output_bias = nn.Parameter(torch.zeros(count, d_model)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits, chosen = project(tokens, self.router.weight, self.router.bias).topk(self.per_token, -1)
        shares = logits.new_zeros(len(tokens), self.count).scatter(-1, chosen, logits.softmax(-1))
        result = torch.zeros_like(tokens)
        for n in range(self.count):
            if torch.compiler.is_compiling():  # a graph cannot depend on which tokens chose an expert
                result = result + shares[:, n : n + 1] * self.expert(n, tokens)
            elif len(rows := (chosen == n).any(-1).nonzero()[:, 0]):
                result = result.index_add(0, rows, shares[rows, n : n + 1] * self.expert(n, tokens[rows]))
        return result.view(x.shape)

    def expert(self, n: int, x: Tensor) -> Tensor:
        """Apply expert `n` to tokens (N, d_model)."""
        up_bias, output_bias = (None if bias is None else bias[n] for bias in (self.up_bias, self.output_bias))
        gate, up = F.linear(x, self.up[n], up_bias).chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
        return F.linear(self.activation(gate) * up, self.output[n], output_bias)
