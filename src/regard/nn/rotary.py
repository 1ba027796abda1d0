"""Rotary position embeddings for attention layers: tables computed once per call, rotation in three operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.positions import Scaling
from regard.positions.rotary import rotary_table

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of queries and keys; the arguments are those of `regard.rotary`.

    >>> import regard as rg, torch
    >>> x, rotary = torch.randn(2, 5, 4, 8), rg.nn.Rotary()  # (B, N, H, D)
    >>> rotated = rotary(x, rotary.table(torch.arange(5), 8, x.dtype))
    >>> torch.allclose(rotated.transpose(1, 2), rg.rotary(x.transpose(1, 2)), atol=1e-6)
    True
    """

    base: float = 10000.0
    d_rotary: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def table(self, positions: Tensor, d_head: int, dtype: torch.dtype) -> Table:
        """Cosines and signed sines, each (N, 1, d_rotary) or (B, N, 1, d_rotary), for positions (N,) or (B, N)."""
        compute = torch.promote_types(dtype, torch.float32)
        cos, sin = rotary_table(positions, self.d_rotary or d_head, base=self.base, scaling=self.scaling, dtype=compute)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def __call__(self, x: Tensor, table: Table) -> Tensor:
        """Rotate `x` (B, N, H, D) by the table of its positions."""
        cos, sin = table
        d_rotary = cos.shape[-1]
        rotary_part = x if d_rotary == x.shape[-1] else x[..., :d_rotary]
        if self.interleaved:
            swapped = rotary_part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = rotary_part.roll(d_rotary // 2, -1)
        rotated = torch.addcmul(rotary_part * cos, swapped, sin).to(x.dtype)
        return rotated if d_rotary == x.shape[-1] else torch.cat((rotated, x[..., d_rotary:]), -1)
