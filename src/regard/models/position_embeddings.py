"""Absolute positions as parts of a model: each adds what it knows of a place to what stands there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.components import make_embedding
from regard.positions import sinusoidal


def table_length(positions: Tensor) -> int:
    """How many positions must be known. A compiled graph does not look at values: there it is their number."""
    if torch.compiler.is_compiling() or not positions.numel():
        return positions.shape[-1]
    return int(positions.max()) + 1


class SinusoidalPositions(nn.Module):
    """Adds the fixed table; it has no weights and knows every length. `halves`: all sines first, then all cosines.

    >>> import torch
    >>> from regard.models.position_embeddings import SinusoidalPositions
    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4), torch.tensor([0, 700]))[0, 0]
    tensor([0., 1., 0., 1.])
    """

    def __init__(self, d_model: int, *, halves: bool = False) -> None:
        super().__init__()
        self.width, self.halves = d_model, halves
        self._table: Tensor | None = None  # no buffer: it is made where and when it is needed

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, d_model), positions (N,) or (B, N)."""
        return x + F.embedding(positions, self.table(x, table_length(positions)))

    def table(self, like: Tensor, length: int) -> Tensor:
        """At least `length` rows, of the dtype and on the device of `like`."""
        known = None if torch.compiler.is_exporting() else self._table  # a graph for any length needs a table for it
        if known is None or len(known) < length or known.dtype != like.dtype or known.device != like.device:
            with torch.inference_mode(False):
                known = sinusoidal(max(2 * length, 64), self.width, dtype=like.dtype, device=like.device)
                if self.halves:
                    known = torch.cat((known[:, 0::2], known[:, 1::2]), -1)
            if not torch.compiler.is_exporting():
                self._table = known
        return known


class LearnedPositions(nn.Module):
    """Adds a row of a learned table of `count` places, from N(0, 1 / d_model).

    >>> import torch
    >>> from regard.models.position_embeddings import LearnedPositions
    >>> LearnedPositions(8, 4)(torch.zeros(1, 2, 4), torch.tensor([0, 7])).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, count: int, d_model: int) -> None:
        super().__init__()
        self.embedding = make_embedding(count, d_model, std=d_model**-0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, d_model), positions (N,) or (B, N)."""
        count = self.embedding.num_embeddings
        if (length := table_length(positions)) > count:
            raise ValueError(
                f"the model knows {count} positions, but token {length} came; shorten the sequence or lower "
                "max_new_tokens"
            )
        return x + F.embedding(positions, self.embedding.weight)


class NoPositions(nn.Module):
    """Adds nothing: positions are the attention's business, as in T5."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


POSITIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "sinusoidal": lambda count, d_model: SinusoidalPositions(d_model),
    "halves": lambda count, d_model: SinusoidalPositions(d_model, halves=True),
    "learned": LearnedPositions,
    "relative": lambda count, d_model: NoPositions(),
}
"""By the names that configurations use; each makes a part for (count, width)."""
