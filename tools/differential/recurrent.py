"""The reference of recurrent layers: one token after the other, by the formulas of their papers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tests.definition import Places, visible
from torch import Tensor

import regard as rg


def recurrent(self: Any, x: Tensor, *, mask: Any = None, context: Any = None, cache: None = None) -> Any:
    """`forward` of a recurrent layer: x (B, N, d_model), with a mask of real tokens or none."""
    assert cache is None, "the yardstick knows no cache"
    context = rg.nn.LayerContext(mask) if context is None else context
    B, N, _ = x.shape
    if context.mask is None:
        real = torch.ones(B, N, dtype=torch.bool)
    else:
        real = visible(context.mask, Places.of((B, 1, 1, N), None))[:, 0, 0]
    x = x.masked_fill(~real[..., None], 0)
    return LAYERS[type(self)](self, x, real, context.positions)


def recurrence(q: Tensor, k: Tensor, v: Tensor, real: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
    """S = exp(decay) S + k uᵀ, u = v or beta (v - Sᵀ k), output Sᵀ q, of q, k (B, N, H, D) and v (B, N, H, E).

    decay (B, N, H) or (B, N, H, D); a token that is not real leaves S as it is. Sums are in float32 at least.
    """
    dtype, heads = q.dtype, v.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    q, k = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    v, state = v.to(wide), q.new_zeros(len(q), heads, k.shape[-1], v.shape[-1], dtype=wide)
    outputs = []
    for t in range(q.shape[1]):
        new = state
        if decay is not None:
            rate = decay[:, t].to(wide).exp()
            new = new * (rate[..., None] if rate.dim() == 3 else rate[..., None, None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None].to(wide) * (u - torch.einsum("bhde,bhd->bhe", new, k[:, t]))
        new = new + torch.einsum("bhd,bhe->bhde", k[:, t], u)
        state = torch.where(real[:, t, None, None, None], new, state)
        outputs.append(torch.einsum("bhde,bhd->bhe", state, q[:, t]))
    return torch.stack(outputs, 1).to(dtype)


def short_convolution(self: Any, x: Tensor) -> Tensor:
    """silu of the weighted sum of the last tokens of x (B, N, channels)."""
    channels, width = self.weight.shape
    rows = []
    for t in range(x.shape[1]):
        row = x.new_zeros(len(x), channels) if self.bias is None else self.bias.expand(len(x), -1)
        for back in range(min(width, t + 1)):
            row = row + self.weight[:, width - 1 - back] * x[:, t - back]
        rows.append(row * row.sigmoid())
    return torch.stack(rows, 1)


def heads_of(x: Tensor, count: int) -> Tensor:
    return x.reshape(*x.shape[:2], count, -1)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def linear(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def real_numbers(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def retention(self: Any, x: Tensor, real: Tensor, positions: Tensor | None) -> Tensor:
    rotary, heads = self.rotary, self.heads
    q, k = (
        rg.rotary(
            heads_of(linear(layer, x), heads).transpose(1, 2), positions, base=rotary.base, d_rotary=rotary.d_rotary,
            interleaved=rotary.interleaved, scaling=rotary.scaling,
        ).transpose(1, 2)
        for layer in (self.query, self.key)
    )  # fmt: skip
    v = heads_of(linear(self.value, x), heads)
    rates = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(heads)], dtype=torch.float64)
    # a token that is not real has a place, which decays
    every = torch.ones_like(real)
    out = recurrence(q, k * self.d_head**-0.5, v, every, rates.expand(*x.shape[:2], -1), None)
    return linear(self.output, (rms(out, 1e-6)).flatten(2) * silu(linear(self.gate, x)))


def gla(self: Any, x: Tensor, real: Tensor, positions: Tensor | None) -> Tensor:
    q, k, v = (heads_of(linear(layer, x), self.heads) for layer in (self.query, self.key, self.value))
    decay = -F.softplus(-real_numbers(linear(self.decay[1], linear(self.decay[0], x)))) / 16
    out = recurrence(q * self.d_head**-0.5, k, v, real, heads_of(decay, self.heads), None)
    return linear(self.output, (rms(out, 1e-5) * self.norm.weight).flatten(2) * silu(linear(self.gate, x)))


def mamba2(self: Any, x: Tensor, real: Tensor, positions: Tensor | None) -> Tensor:
    inner, state = self.d_inner, self.groups * self.d_state
    z, mixed, dt = linear(self.input, x).split((inner, inner + 2 * state, self.heads), -1)
    u, b, c = short_convolution(self.convolution, mixed).split((inner, state, state), -1)
    u, b, c = heads_of(u, self.heads), heads_of(b, self.groups), heads_of(c, self.groups)
    dt = F.softplus(real_numbers(dt) + real_numbers(self.dt_bias))
    decay = -dt * real_numbers(self.A_log).exp()
    out = recurrence(c, b, (real_numbers(u) * dt[..., None]).to(x.dtype), real, decay, None)
    y = (out + self.D[:, None] * u).flatten(2) * silu(z)
    return linear(self.output, rms(heads_of(y, self.groups), 1e-5).flatten(2) * self.weight)


def deltanet(self: Any, x: Tensor, real: Tensor, positions: Tensor | None) -> Tensor:
    q, k, v = short_convolution(self.convolution, linear(self.qkv, x)).split(self.widths, -1)
    q, k = (heads_of(y, self.heads) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta, decay = real_numbers(linear(self.beta, x)).sigmoid(), None
    if isinstance(self, rg.nn.GatedDeltaNet):
        rate = real_numbers(self.A_log).exp()
        decay = -rate * F.softplus(real_numbers(linear(self.decay, x)) + real_numbers(self.dt_bias))
    out = recurrence(q * self.d_head**-0.5, k, heads_of(v, self.value_heads), real, decay, beta)
    out = (rms(out, self.norm.eps) * self.norm.weight).flatten(2)
    return linear(self.output, out * silu(linear(self.gate, x)) if decay is not None else out)


LAYERS = {
    rg.nn.Retention: retention, rg.nn.GatedLinearAttention: gla, rg.nn.Mamba2: mamba2, rg.nn.DeltaNet: deltanet,
    rg.nn.GatedDeltaNet: deltanet,
}  # fmt: skip
