"""Absolute positions as parts of a model: each adds what it knows of a place to what stands there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.parts import embedding
from regard.positions import sinusoidal


def reach(positions: Tensor) -> int:
    """How many positions must be known. A compiled graph does not look at values: there it is their number."""
    if torch.compiler.is_compiling() or not positions.numel():
        return positions.shape[-1]
    return int(positions.max()) + 1


class Sinusoidal(nn.Module):
    """Adds the fixed table; it has no weights and knows every length. `halves`: all sines first, then all cosines.

    >>> import torch
    >>> from regard.models.places import Sinusoidal
    >>> Sinusoidal(4)(torch.zeros(1, 2, 4), torch.tensor([0, 700]))[0, 0]
    tensor([0., 1., 0., 1.])
    """

    def __init__(self, width: int, *, halves: bool = False) -> None:
        super().__init__()
        self.width, self.halves = width, halves
        self._table: Tensor | None = None  # no buffer: it is made where and when it is needed

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, width), positions (N,) or (B, N)."""
        return x + F.embedding(positions, self.table(x, reach(positions)))

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


class Learned(nn.Module):
    """Adds a row of a learned table of `count` places, from N(0, 1 / width).

    >>> import torch
    >>> from regard.models.places import Learned
    >>> Learned(8, 4)(torch.zeros(1, 2, 4), torch.tensor([0, 7])).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.embedding = embedding(count, width, std=width**-0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, width), positions (N,) or (B, N)."""
        count = self.embedding.num_embeddings
        if (length := reach(positions)) > count:
            raise ValueError(
                f"the model knows {count} positions, but token {length} came; shorten the sequence or lower limit"
            )
        return x + F.embedding(positions, self.embedding.weight)


class Nowhere(nn.Module):
    """Adds nothing: positions are the attention's business, as in T5."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


POSITIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "sinusoidal": lambda count, width: Sinusoidal(width),
    "halves": lambda count, width: Sinusoidal(width, halves=True),
    "learned": Learned,
    "relative": lambda count, width: Nowhere(),
}
"""By the names that configurations use; each makes a part for (count, width)."""
