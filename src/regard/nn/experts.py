"""Mixtures of experts: feed-forward layers of which each token uses a few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.attention import linear
from regard.nn.feedforward import Activation


@dataclass(frozen=True)
class Routing:
    """How a mixture chooses experts by the logits of its router, and their shares of the output.

    scores: "chosen" is the softmax of the chosen logits. "softmax" and "sigmoid" score all experts; the shares of the
        chosen ones are their scores, divided by their sum if `normalize`, times `scale`.
    groups: experts are chosen from the `groups_per_token` best of so many groups of equal size, by the "max" of the
        scores of a group or by the sum of its two best, "top2" (DeepSeek).
    corrected: whether a tensor, not trained by gradients, is added to the scores by which experts are chosen.

    >>> import regard as rg, torch
    >>> rg.nn.Routing("softmax", normalize=True)(torch.tensor([[0.0, 2.0, 1.0]]), 2, None)[0]
    tensor([[1, 2]])
    """

    scores: str = "chosen"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: str = "max"
    corrected: bool = False

    def check(self, count: int, per_token: int) -> None:
        """Raise unless the values are valid for `count` experts of which a token uses `per_token`."""
        if self.scores not in ("chosen", "softmax", "sigmoid") or self.group_score not in ("max", "top2"):
            raise ValueError(
                'scores must be "chosen", "softmax" or "sigmoid" and group_score "max" or "top2", got '
                f"{self.scores!r} and {self.group_score!r}"
            )
        if self.scores == "chosen" and self != Routing():
            raise ValueError('scores="chosen" has no other options; use scores="softmax"')
        if not 1 <= self.groups_per_token <= self.groups or count % self.groups:
            raise ValueError(
                f"{count} experts must be a multiple of groups and groups_per_token at most groups, got {self.groups} "
                f"and {self.groups_per_token}"
            )
        size = count // self.groups
        if per_token > self.groups_per_token * size or (self.groups > 1 and self.group_score == "top2" and size < 2):
            raise ValueError(
                f"{self.groups_per_token} groups of {size} experts are too few for per_token = {per_token} and "
                f"group_score = {self.group_score!r}"
            )

    def __call__(self, logits: Tensor, per_token: int, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their shares, each (N, per_token), for logits (N, count)."""
        if self.scores == "chosen":
            best, chosen = logits.topk(per_token, -1)
            return chosen, best.softmax(-1)
        real = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = real.softmax(-1) if self.scores == "softmax" else real.sigmoid()
        ranked = scores if correction is None else scores + correction
        if self.groups > 1:
            grouped = ranked.unflatten(-1, (self.groups, -1))
            best = grouped.amax(-1) if self.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(
                -1, best.topk(self.groups_per_token, -1).indices, True
            )
            ranked = grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)
        chosen = ranked.topk(per_token, -1).indices
        shares = scores.gather(-1, chosen)
        if self.normalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return chosen, (shares * self.scale).to(logits.dtype)


CHOSEN = Routing()


class Experts(nn.Module):
    """A mixture of gated feed-forward layers, (..., d_model) to (..., d_model).

        chosen, logits = top `per_token` of router(x)
        output         = sum over chosen of softmax(logits) * expert(x)

    An expert is `down(activation(gate(x)) * up(x))`. With a `limit`, gate is at most `limit`, up is clamped to
    [-limit, limit], and the product is with up + 1 (gpt-oss). `up` (count, 2 * d_hidden, d_model) holds the weights of
    gate and up, in this order, `output` (count, d_model, d_hidden) those of down. Weights start from N(0, 1 / fan_in),
    biases from 0.

    routing: other ways to choose experts and their shares. shared: a feed-forward layer that every token uses, added
    to the output; with `shared_gate`, times sigmoid(x w).

    >>> import regard as rg, torch
    >>> rg.nn.Experts(16, 32, count=4, per_token=2)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    correction: Tensor | None

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
        routing: Routing = CHOSEN,
        shared: nn.Module | None = None,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= per_token <= count:
            raise ValueError(f"per_token must be between 1 and the {count} experts, got {per_token}")
        self.count, self.per_token, self.activation, self.limit = count, per_token, activation, limit
        routing.check(count, per_token)
        if shared_gate and shared is None:
            raise ValueError("shared_gate is an option of `shared`; pass a feed-forward layer")
        self.routing, self.shared = routing, shared
        self.shared_gate = linear(d_model, 1, bias=False) if shared_gate else None
        self.router = linear(d_model, count, bias=bias)
        self.register_buffer("correction", torch.zeros(count) if routing.corrected else None)
        self.up = nn.Parameter(torch.randn(count, 2 * d_hidden, d_model) / math.sqrt(d_model))
        self.output = nn.Parameter(torch.randn(count, d_model, d_hidden) / math.sqrt(d_hidden))
        self.up_bias = nn.Parameter(torch.zeros(count, 2 * d_hidden)) if bias else None
        self.output_bias = nn.Parameter(torch.zeros(count, d_model)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        chosen, share = self.routing(logits, self.per_token, self.correction)
        shares = logits.new_zeros(len(tokens), self.count).scatter(-1, chosen, share)
        result = torch.zeros_like(tokens)
        for n in range(self.count):
            if torch.compiler.is_compiling():  # a graph cannot depend on which tokens chose an expert
                result = result + shares[:, n : n + 1] * self.expert(n, tokens)
            elif len(rows := (chosen == n).any(-1).nonzero()[:, 0]):
                result = result.index_add(0, rows, shares[rows, n : n + 1] * self.expert(n, tokens[rows]))
        result = result.view(x.shape)
        if self.shared is None:
            return result
        shared = self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x).sigmoid()
        return result + (shared if gate is None else gate * shared)

    def expert(self, n: int, x: Tensor) -> Tensor:
        """Apply expert `n` to tokens (N, d_model)."""
        up_bias, output_bias = (None if bias is None else bias[n] for bias in (self.up_bias, self.output_bias))
        gate, up = F.linear(x, self.up[n], up_bias).chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
        return F.linear(self.activation(gate) * up, self.output[n], output_bias)
