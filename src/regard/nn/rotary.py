"""Rotary positions as a part of an attention: tables worked out once a call, and a turn of three operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.positions import Scaling
from regard.positions.rotary import rotary_table

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """How q and k are turned by their positions; the arguments are those of `regard.rotary`.

    >>> import regard as rg, torch
    >>> x, turn = torch.randn(2, 5, 4, 8), rg.nn.Rotary()  # (B, N, H, D)
    >>> turned = turn(x, turn.table(torch.arange(5), 8, x.dtype))
    >>> torch.allclose(turned.transpose(1, 2), rg.rotary(x.transpose(1, 2)), atol=1e-6)
    True
    """

    base: float = 10000.0
    d_rotary: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def table(self, positions: Tensor, d_head: int, dtype: torch.dtype) -> Table:
        """Cosines and signed sines for positions (N,) or (B, N) and heads of width d_head: (N or B N, 1, d_rotary)."""
        compute = torch.promote_types(dtype, torch.float32)
        cos, sin = rotary_table(positions, self.d_rotary or d_head, base=self.base, scaling=self.scaling, dtype=compute)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def __call__(self, x: Tensor, table: Table) -> Tensor:
        """Turn `x` (B, N, H, D) by a table of its positions."""
        cos, sin = table
        d_rotary = cos.shape[-1]
        turning = x if d_rotary == x.shape[-1] else x[..., :d_rotary]
        if self.interleaved:
            swapped = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = turning.roll(d_rotary // 2, -1)
        turned = torch.addcmul(turning * cos, swapped, sin).to(x.dtype)
        return turned if d_rotary == x.shape[-1] else torch.cat((turned, x[..., d_rotary:]), -1)
