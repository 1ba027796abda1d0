"""Attention layers whose heads interact: differential attention, talking heads, gated outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.nn.attention import MultiHeadAttention, check_width_free, linear, with_scale


class OutputGate(nn.Module):
    """A gate per channel or head on the outputs of attention: `out * sigmoid(x W)` (Qiu et al. 2025; Qwen3-Next).

    d_gate: width of the gate: heads * d_value, or `heads` for one number per head. Passed to `MultiHeadAttention`.

    >>> import regard as rg, torch
    >>> layer = rg.nn.MultiHeadAttention(32, heads=4, gate=rg.nn.OutputGate(32, 32))
    >>> layer(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(self, d_model: int, d_gate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.projection = linear(d_model, d_gate, bias=bias)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Gate outputs (B, N, H, E) by the inputs x (B, N, d_model)."""
        gate, (heads, d_value) = self.projection(x).sigmoid(), out.shape[2:]
        if gate.shape[-1] not in (heads, heads * d_value):
            raise ValueError(
                f"d_gate must be the number of heads, {heads}, or heads * d_value = {heads * d_value}, got "
                f"{gate.shape[-1]}"
            )
        return out * gate.unflatten(-1, (heads, -1))


class DifferentialAttention(MultiHeadAttention):
    """Differential attention (Ye et al. 2024): a head subtracts one softmax from another, to cancel noise.

        out_h  = (softmax(q_h1 k_h1ᵀ / sqrt(d_head)) - lambda softmax(q_h2 k_h2ᵀ / sqrt(d_head))) v_h
        output = concat_h((1 - lambda_init) RMSNorm(out_h)) W_o
        lambda = exp(a1 · b1) - exp(a2 · b2) + lambda_init          a, b: learned, (d_head,), shared by the heads

    heads, kv_heads: numbers of differential heads, and of those of keys and values. d_head: width of each of the two
        queries and keys of a head, d_model / (2 heads) by default; values are twice as wide.
    lambda_init: 0.8 - 0.6 exp(-0.3 n) in layer n = 0, 1, ... of the paper.
    attend: as in `MultiHeadAttention`, for 2 * heads softmaxes in the order h1, h2, ...: tensors per head have that
        many. Its score is a `Dot`. Keyword arguments that are not listed are those of `MultiHeadAttention`.

    `capture` and `weights` show the two softmaxes of each head.

    >>> import regard as rg, torch
    >>> layer = rg.nn.DifferentialAttention(32, heads=2, attend=rg.Attention(mask=rg.causal()))
    >>> layer(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    rearranges_heads = True

    def __init__(
        self, d_model: int, heads: int, *, kv_heads: int | None = None, d_head: int | None = None,
        lambda_init: float = 0.8, attend: Attention | None = None, eps: float = 1e-5, **options: Any,
    ) -> None:  # fmt: skip
        if heads < 1 or (d_head is None and d_model % (2 * heads)):
            raise ValueError(
                f"d_model = {d_model} is not a multiple of 2 * heads = {2 * heads}; change one or pass d_head"
            )
        if "d_value" in options:
            raise ValueError("values of DifferentialAttention are 2 * d_head wide; leave out d_value")
        d_head = d_model // (2 * heads) if d_head is None else d_head
        attend = with_scale(attend or Attention(), d_head, type(self))
        check_width_free(attend.bias)
        pairs = None if kv_heads is None else 2 * kv_heads
        super().__init__(d_model, 2 * heads, kv_heads=pairs, d_head=d_head, attend=attend, **options)
        self.lambda_init = lambda_init
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, d_head))  # a1, b1, a2, b2
        self.norm = nn.RMSNorm(2 * d_head, eps=eps)

    def arrange_query(self, q: Tensor) -> Tensor:
        """Pad the two queries of a head to the width of its two keys."""
        first, second = q.unflatten(2, (-1, 2)).unbind(3)
        return torch.stack((F.pad(first, (0, self.d_head)), F.pad(second, (self.d_head, 0))), 3).flatten(2, 3)

    def arrange_key_value(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.unflatten(2, (-1, 2)).flatten(3), v.unflatten(2, (-1, 2)).flatten(3)

    def arrange_output(self, out: Tensor) -> Tensor:
        first, second = out.unflatten(2, (-1, 2)).unbind(3)  # (B, N, heads, 2 * d_head)
        a1, b1, a2, b2 = self.lambdas.to(torch.promote_types(self.lambdas.dtype, torch.float32))
        share = ((a1 * b1).sum().exp() - (a2 * b2).sum().exp() + self.lambda_init).to(out.dtype)
        return self.norm(first - share * second) * (1 - self.lambda_init)


class TalkingHeadsAttention(MultiHeadAttention):
    """Talking-heads attention (Shazeer et al. 2020): heads mix scores before the softmax, and weights after it.

        scores_h  = sum_g P_hg q_g k_gᵀ / sqrt(d_head)            P, W: learned, (heads, heads), the identity at first
        weights_h = sum_g W_hg softmax(scores_g)
        output    = concat_h(weights_h v_h) W_o

    attend: as in `MultiHeadAttention`; its bias and mask are applied to mixed scores, its dropout before the second
        mix. Its score is a `Dot`. Keyword arguments that are not listed are those of `MultiHeadAttention`.

    Scores of all pairs of heads come from keys of all heads side by side, so that no Q x K tensor is built; queries
    and outputs are `heads` times as wide. `capture` and `weights` show softmax(scores_h).

    >>> import regard as rg, torch
    >>> layer = rg.nn.TalkingHeadsAttention(32, heads=4, attend=rg.Attention(mask=rg.causal()))
    >>> layer(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    rearranges_heads = True

    def __init__(
        self, d_model: int, heads: int, *, d_head: int | None = None, attend: Attention | None = None, **options: Any
    ) -> None:
        if "kv_heads" in options:
            raise ValueError("TalkingHeadsAttention has as many heads of keys as of queries; leave out kv_heads")
        super().__init__(d_model, heads, d_head=d_head, attend=attend, **options)
        self.attend = with_scale(self.attend, self.d_head, type(self))
        check_width_free(self.attend.bias)
        self.score_mix, self.weight_mix = nn.Parameter(torch.eye(heads)), nn.Parameter(torch.eye(heads))

    def arrange_query(self, q: Tensor) -> Tensor:
        return torch.einsum("hg,bngd->bnhgd", self.score_mix, q).flatten(3)

    def arrange_key_value(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.flatten(2).unsqueeze(2), v.flatten(2).unsqueeze(2)

    def arrange_output(self, out: Tensor) -> Tensor:
        return torch.einsum("hg,bnghe->bnhe", self.weight_mix, out.unflatten(-1, (self.heads, -1)))
