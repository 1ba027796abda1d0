"""What an attention costs, whoever computes it: the one model behind `explain` and behind plans."""

from __future__ import annotations

from regard.geometry import Frame
from regard.masks import Mask, tiles
from regard.scores import Additive, Score

TILE = (64, 64)


def visited_entries(mask: Mask | None, frame: Frame, size: tuple[int, int] = TILE) -> int:
    """How many places (b, h, i, j) lie in tiles that a mask does not leave empty.

    >>> import regard as rg
    >>> from regard.geometry import Frame
    >>> places(rg.causal(), Frame(1, 2, 256, 256, 0))
    81920
    """
    table = tiles(mask, frame, size)
    return table.entries() * (frame.B // max(table.extent[0], 1)) * (frame.H // max(table.extent[1], 1))


def forward_flops(count: int, score: Score, D: int, E: int) -> int:
    """Of `count` places: a score, and a value added with a weight. A tanh costs about eight operations."""
    return count * ((10 if isinstance(score, Additive) else 2) * D + 2 * E)


def backward_flops(count: int, score: Score, D: int, E: int) -> int:
    """Of `count` places: the score again, and what each of query, key, value and weight is given back."""
    return forward_flops(count, score, D, E) + count * (4 * D + 2 * E)
