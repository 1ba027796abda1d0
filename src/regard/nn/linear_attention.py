"""The layers of published models with linear attention: RetNet, GLA, Mamba-2, DeltaNet and Gated DeltaNet."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.linear import LinearAttention
from regard.nn.attention import linear
from regard.nn.context import LayerContext
from regard.nn.convolution import ShortConvolution
from regard.nn.recurrent import Inputs, RecurrentCache, RecurrentLayer, Tokens, convolve
from regard.nn.rotary import Rotary


class Retention(RecurrentLayer):
    """RetNet's multi-scale retention: rotated queries and keys, a constant decay per head, a gate.

        output = (norm(retention(q, k, v)) * silu(x W_g)) W_o        norm: per head, without weights

    d_value: width of a head's values, twice that of its queries by default. eps: of the norm.

    >>> import regard as rg, torch
    >>> rg.nn.Retention(32, heads=4)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self, d_model: int, heads: int, *, d_value: int | None = None, rotary: Rotary | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.heads, self.d_head, self.eps = heads, _divide(d_model, heads), eps
        self.d_value = 2 * self.d_head if d_value is None else d_value
        self.query, self.key = linear(d_model, d_model, bias=False), linear(d_model, d_model, bias=False)
        self.value = linear(d_model, heads * self.d_value, bias=False)
        self.gate = linear(d_model, heads * self.d_value, bias=False)
        self.output = linear(heads * self.d_value, d_model, bias=False)
        self.rotary = Rotary(interleaved=True) if rotary is None else rotary
        self.attend = LinearAttention.retnet(heads)

    def project_inputs(self, x: Tensor, tokens: Tokens, context: LayerContext, cache: RecurrentCache | None) -> Inputs:
        query, key = (_heads(layer(x), self.heads) for layer in (self.query, self.key))
        start = 0 if cache is None else cache.seen_tokens
        table = context.table(self.rotary, self.d_head, query, start=start)
        query, key = self.rotary(query, table), self.rotary(key * self.d_head**-0.5, table)
        return Inputs(query, key, _heads(self.value(x), self.heads))

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        return self.output(F.rms_norm(output, output.shape[-1:], eps=self.eps).flatten(2) * F.silu(self.gate(x)))


class GatedLinearAttention(RecurrentLayer):
    """GLA: a decay per token and channel, logsigmoid(x W_1 W_2) / 16, and a gated output.

        output = (norm(attention(q, k, v, decay)) * silu(x W_g)) W_o        norm: RMS per head

    d_head, d_value: widths of queries and values of a head, d_model / (2 heads) and d_model / heads by default.
    rank: width between W_1 and W_2.

    >>> import regard as rg, torch
    >>> rg.nn.GatedLinearAttention(32, heads=2)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self, d_model: int, heads: int, *, d_head: int | None = None, d_value: int | None = None, rank: int = 16
    ) -> None:
        super().__init__()
        self.heads = heads
        self.d_head = _divide(d_model, 2 * heads) if d_head is None else d_head
        d_value = _divide(d_model, heads) if d_value is None else d_value
        self.query = linear(d_model, heads * self.d_head, bias=False)
        self.key = linear(d_model, heads * self.d_head, bias=False)
        self.value = linear(d_model, heads * d_value, bias=False)
        self.decay = nn.Sequential(linear(d_model, rank, bias=False), linear(rank, heads * self.d_head))
        self.gate, self.output = (
            linear(d_model, heads * d_value, bias=False),
            linear(heads * d_value, d_model, bias=False),
        )
        self.norm = nn.RMSNorm(d_value, eps=1e-5)
        self.attend = LinearAttention.gla()

    def project_inputs(self, x: Tensor, tokens: Tokens, context: LayerContext, cache: RecurrentCache | None) -> Inputs:
        query, key, value = (_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        decay = F.logsigmoid(_real(self.decay(x))) / 16
        return Inputs(query * self.d_head**-0.5, key, value, _heads(decay, self.heads))

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        return self.output(self.norm(output).flatten(2) * F.silu(self.gate(x)))


class Mamba2(RecurrentLayer):
    """Mamba-2's layer: a state space with one decay per head and token, as linear attention.

        z, (x, B, C), dt = inputs W;   x, B, C = silu(convolution(x, B, C));   dt = softplus(dt + dt_bias)
        y = attention(C, B, dt x, decay=-dt exp(A_log)) + D x;   output = norm(y silu(z)) W_o

    heads: of x, each `d_head` wide; by default 2 d_model / heads. d_state: width of B and C. groups: heads of B and C.

    >>> import regard as rg, torch
    >>> rg.nn.Mamba2(32, heads=4, d_state=16)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        d_head: int | None = None,
        d_state: int = 128,
        groups: int = 1,
        kernel_size: int = 4,
    ) -> None:
        super().__init__()
        d_head = _divide(2 * d_model, heads) if d_head is None else d_head
        self.heads, self.groups, self.d_inner, self.d_state = heads, groups, heads * d_head, d_state
        if heads % groups:
            raise ValueError(f"heads must be a multiple of groups, got heads={heads} and groups={groups}")
        channels = self.d_inner + 2 * groups * d_state
        self.input = linear(d_model, self.d_inner + channels + heads, bias=False)
        self.convolution = ShortConvolution(channels, kernel_size, bias=True)
        self.dt_bias, self.A_log = _initial_gate(heads)
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(self.d_inner // groups, eps=1e-5, elementwise_affine=False)
        self.weight = nn.Parameter(torch.ones(self.d_inner))
        self.output = linear(self.d_inner, d_model, bias=False)
        self.attend = LinearAttention.mamba2()

    def project_inputs(self, x: Tensor, tokens: Tokens, context: LayerContext, cache: RecurrentCache | None) -> Inputs:
        channels, state = self.convolution.weight.shape[0], self.groups * self.d_state
        gate, mixed, dt = self.input(x).split((self.d_inner, channels, self.heads), -1)
        mixed = convolve(self.convolution, mixed, tokens, cache)
        skip, key, query = mixed.split((self.d_inner, state, state), -1)
        skip, key, query = _heads(skip, self.heads), _heads(key, self.groups), _heads(query, self.groups)
        dt = F.softplus(_real(dt) + _real(self.dt_bias))
        value = (_real(skip) * dt[..., None]).to(query.dtype)
        return Inputs(query, key, value, -dt * _real(self.A_log).exp(), skip=skip, gate=gate)

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        assert inputs.skip is not None
        assert inputs.gate is not None
        y = (output + self.D.to(output.dtype)[:, None] * inputs.skip).flatten(2) * F.silu(inputs.gate)
        return self.output(self.norm(y.unflatten(-1, (self.groups, -1))).flatten(2) * self.weight)


class DeltaNet(RecurrentLayer):
    """DeltaNet: short convolutions, queries and keys of length 1, and the delta rule with beta = sigmoid(x W_b).

        output = norm(attention(q, k, v, beta)) W_o        norm: RMS per head

    heads, value_heads: numbers of heads of queries and keys, and of values (a multiple; by default equal).
    d_head, d_value: widths of a head's queries and values, d_model / heads by default. kernel_size: of the convolution.

    >>> import regard as rg, torch
    >>> rg.nn.DeltaNet(32, heads=2)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        value_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        kernel_size: int = 4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.heads, self.value_heads = heads, heads if value_heads is None else value_heads
        if heads < 1 or self.value_heads % heads:
            raise ValueError(
                f"value_heads must be a multiple of heads, got heads={heads} and value_heads={self.value_heads}"
            )
        self.d_head = _divide(d_model, heads) if d_head is None else d_head
        self.d_value = self.d_head if d_value is None else d_value
        self.widths = [heads * self.d_head, heads * self.d_head, self.value_heads * self.d_value]  # of q, k and v
        self.qkv = linear(d_model, sum(self.widths), bias=False)
        self.convolution = ShortConvolution(sum(self.widths), kernel_size)
        self.beta = linear(d_model, self.value_heads, bias=False)
        self.norm = nn.RMSNorm(self.d_value, eps=eps)
        self.output = linear(self.widths[2], d_model, bias=False)
        self.attend = LinearAttention.deltanet()

    def project_inputs(self, x: Tensor, tokens: Tokens, context: LayerContext, cache: RecurrentCache | None) -> Inputs:
        mixed = convolve(self.convolution, self.qkv(x), tokens, cache)
        query, key, value = mixed.split(self.widths, -1)
        query, key = _unit(_heads(query, self.heads)), _unit(_heads(key, self.heads))
        beta = _real(self.beta(x)).sigmoid()
        return Inputs(query * self.d_head**-0.5, key, _heads(value, self.value_heads), self.log_decay(x), beta)

    def log_decay(self, x: Tensor) -> Tensor | None:
        """The decay (B, N, value_heads), if there is one."""
        return None

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        return self.output(self.norm(output).flatten(2))


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet, as in Qwen3-Next: DeltaNet with a decay per head and token, and a gated output.

        decay  = -exp(A_log) softplus(x W_a + dt_bias)
        output = (norm(attention(q, k, v, decay, beta)) * silu(x W_z)) W_o

    >>> import regard as rg, torch
    >>> rg.nn.GatedDeltaNet(32, heads=2, value_heads=4, d_head=8)(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        value_heads: int | None = None,
        d_head: int | None = None,
        d_value: int | None = None,
        kernel_size: int = 4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(
            d_model, heads, value_heads=value_heads, d_head=d_head, d_value=d_value, kernel_size=kernel_size, eps=eps
        )
        self.decay, self.gate = (
            linear(d_model, self.value_heads, bias=False),
            linear(d_model, self.widths[2], bias=False),
        )
        self.dt_bias, self.A_log = _initial_gate(self.value_heads)
        self.attend = LinearAttention.gated_deltanet()

    def log_decay(self, x: Tensor) -> Tensor:
        rate = _real(self.A_log).exp()
        return -rate * F.softplus(_real(self.decay(x)) + _real(self.dt_bias))

    def project_output(self, x: Tensor, inputs: Inputs, output: Tensor) -> Tensor:
        return self.output(self.norm(output).flatten(2) * F.silu(self.gate(x)))


def _divide(width: int, heads: int) -> int:
    if heads < 1 or width % heads:
        raise ValueError(f"a width of {width} cannot be divided into {heads} heads; change one of them or pass d_head")
    return width // heads


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, heads * D) to (B, N, heads, D)."""
    return x.unflatten(-1, (heads, -1))


def _real(x: Tensor) -> Tensor:
    """float32 at least: a rounded decay is compounded over the sequence."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x|, with eps under the square root."""
    real = _real(x)
    return (real * torch.rsqrt(real.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _initial_gate(heads: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Mamba-2's initial dt_bias and A_log: time steps from 0.001 to 0.1 (log-uniform), rates from 1 to 16."""
    dt = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt))), nn.Parameter((torch.rand(heads) * 15 + 1).log())
