"""Masks as text."""

from __future__ import annotations

from regard.geometry import Frame
from regard.masks.algebra import Mask
from regard.masks.arguments import check_int
from regard.masks.tiles import tiles


def draw(mask: Mask, queries: int | None, keys: int | None, width: int) -> str:
    """Draw the first batch row and head with one character per tile: `█` full, `▒` partial, `·` empty."""
    if queries is None and keys is None:
        queries, keys = mask.expected_size() or (mask.preview_size(), mask.preview_size())
        if not queries or not keys:
            return ""  # built for no tokens
    keys = check_int("keys", queries if keys is None else keys, 1)
    queries, width = check_int("queries", keys if queries is None else queries, 1), check_int("width", width, 1)
    size = max(-(-keys // width), -(-queries // width), 1)
    batch, heads = mask.extent(Frame(1, 1, 1, 1, 0))
    frame = Frame(batch, heads, queries, keys, keys - queries)
    mask.check(frame)
    table = tiles(mask, frame, (size, size))
    lines = []
    for r in range(table.grid[0]):
        line = ["·"] * table.grid[1]
        for start, stop, full in table.runs(0, 0, r):
            line[start:stop] = ["█" if full else "▒"] * (stop - start)
        lines.append("".join(line))
    return "\n".join(lines)
