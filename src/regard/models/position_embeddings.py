"""Absolute position embeddings, added to token embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.components import make_embedding
from regard.positions import sinusoidal


def table_length(positions: Tensor) -> int:
    """Length of a table that covers all positions. A compiled graph cannot read values: there it is their number."""
    if torch.compiler.is_compiling() or not positions.numel():
        return positions.shape[-1]
    return int(positions.max()) + 1


class SinusoidalPositions(nn.Module):
    """Add the fixed sinusoidal table, for any length.

    halves: sines in the first half of the channels, then cosines. inclusive: the last of the D / 2 frequencies is
    1 / 10000, as in fairseq, instead of the one before it. first: the position of the first token.

    >>> import torch
    >>> from regard.models.position_embeddings import SinusoidalPositions
    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4), torch.tensor([0, 700]))[0, 0]
    tensor([0., 1., 0., 1.])
    """

    def __init__(self, d_model: int, *, halves: bool = False, inclusive: bool = False, first: int = 0) -> None:
        super().__init__()
        self.width, self.halves, self.inclusive, self.first = d_model, halves, inclusive, first
        self._table: Tensor | None = None  # a cache rather than a buffer: computed on demand

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add positions (N,) or (B, N) to x (B, N, d_model)."""
        positions = positions + self.first if self.first else positions
        return x + F.embedding(positions, self.table(x, table_length(positions) + self.first))

    def table(self, like: Tensor, length: int) -> Tensor:
        """Return a table of at least `length` rows with the dtype and device of `like`."""
        table = (
            None if torch.compiler.is_exporting() else self._table
        )  # an exported graph computes its table for any length
        if table is None or len(table) < length or table.dtype != like.dtype or table.device != like.device:
            with torch.inference_mode(False):
                d_model = self.width
                base = 10000.0 ** (d_model / (d_model - 2)) if self.inclusive and d_model > 2 else 10000.0
                table = sinusoidal(max(2 * length, 64), d_model, base=base, dtype=like.dtype, device=like.device)
                if self.halves:
                    table = torch.cat((table[:, 0::2], table[:, 1::2]), -1)
            if not torch.compiler.is_exporting():
                self._table = table
        return table


class LearnedPositions(nn.Module):
    """Add rows of a learned table of `count` positions, from N(0, 1 / d_model). first: the row of the first token.

    >>> import torch
    >>> from regard.models.position_embeddings import LearnedPositions
    >>> LearnedPositions(8, 4)(torch.zeros(1, 2, 4), torch.tensor([0, 7])).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, count: int, d_model: int, *, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.embedding = make_embedding(count, d_model, std=d_model**-0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add positions (N,) or (B, N) to x (B, N, d_model)."""
        count = self.embedding.num_embeddings - self.first
        if (length := table_length(positions)) > count:
            raise ValueError(
                f"the model has {count} positions, but the sequence has {length} tokens; shorten it or lower "
                "max_new_tokens"
            )
        return x + F.embedding(positions + self.first if self.first else positions, self.embedding.weight)


class NoPositions(nn.Module):
    """Add nothing, for models whose attention encodes positions, such as T5."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


POSITIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "sinusoidal": lambda count, d_model, first: SinusoidalPositions(d_model, first=first),
    "halves": lambda count, d_model, first: SinusoidalPositions(d_model, halves=True, first=first),
    "fairseq": lambda count, d_model, first: SinusoidalPositions(d_model, halves=True, inclusive=True, first=first),
    "learned": lambda count, d_model, first: LearnedPositions(count, d_model, first=first),
    "relative": lambda count, d_model, first: NoPositions(),
}
"""Factories by the names used in configurations, called with (count, d_model, first)."""
