"""Sparse attention patterns from the literature, composed from other masks."""

from __future__ import annotations

from collections.abc import Iterable

from regard.masks.algebra import Mask
from regard.masks.arguments import check_int
from regard.masks.explicit import random_blocks
from regard.masks.patterns import dilated, global_tokens, window


def longformer(width: int, positions: Iterable[int] = (), *, step: int = 1) -> Mask:
    """Longformer: a window of `width` keys on each side, dilated by `step`, and global tokens.

    >>> import regard as rg
    >>> rg.longformer(128, [0])
    window(128, 128) | global_tokens([0])
    """
    width = check_int("width", width, 0)
    local = window(width, width) if step == 1 else dilated(width, step)
    chosen = global_tokens(positions)
    return local if chosen == global_tokens([]) else local | chosen


def bigbird(size: int, *, blocks: int = 3, random: int = 3, ends: int = 1, seed: int = 0) -> Mask:
    """BigBird: `blocks // 2` blocks of `size` on each side, `random_blocks(random, size)`, the first `ends` global.

    >>> import regard as rg
    >>> rg.bigbird(2, random=1, ends=1)
    window(2, 2) | random_blocks(1, 2, seed=0) | global_tokens([0, 1])
    """
    size = check_int("size", size, 1)
    reach = check_int("blocks", blocks, 1) // 2 * size
    mask: Mask = window(reach, reach)
    if check_int("random", random, 0):
        mask = mask | random_blocks(random, size, seed)
    if check_int("ends", ends, 0):
        mask = mask | global_tokens(range(ends * size))
    return mask
