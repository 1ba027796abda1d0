"""The cost model of an attention, independent of the engine; used by `explain` and by plans."""

from __future__ import annotations

from regard.geometry import Frame
from regard.masks import Mask, tiles
from regard.scores import Additive, Score

TILE = (64, 64)


def visited_entries(mask: Mask | None, frame: Frame, size: tuple[int, int] = TILE) -> int:
    """Return the number of entries (b, h, i, j) in tiles that a mask does not leave empty.

    >>> import regard as rg
    >>> from regard.geometry import Frame
    >>> visited_entries(rg.causal(), Frame(1, 2, 256, 256, 0))
    81920
    """
    table = tiles(mask, frame, size)
    return table.entries() * (frame.B // max(table.extent[0], 1)) * (frame.H // max(table.extent[1], 1))


def forward_flops(count: int, score: Score, D: int, E: int) -> int:
    """Return the FLOPs of `count` entries: a score and a weighted value each. A tanh counts as eight operations."""
    return count * ((10 if isinstance(score, Additive) else 2) * D + 2 * E)


def backward_flops(count: int, score: Score, D: int, E: int) -> int:
    """Return the backward FLOPs of `count` entries: the score again, and gradients of query, key, value and weight."""
    return forward_flops(count, score, D, E) + count * (4 * D + 2 * E)
