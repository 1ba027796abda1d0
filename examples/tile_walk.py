"""Draw the tile walk of docs/inside/kernels.md: which groups of scores the kernels compute.

    python examples/tile_walk.py docs/inside/walk.svg

Sizes are those of csrc (gemm.h, strips.h, schedule.h) for AVX2 and float32; visibility is computed from the masks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import regard as rg
from regard.geometry import Frame, pad_leading
from regard.masks import Mask, tiles

STRIP, PANEL, BLOCK, TILE = 6, 16, 96, 64  # rows, keys, rows, rows and keys
ALL, SOME, NONE, OUTSIDE = "#3f51b5", "#9fa8da", "#e8eaf6", "#ffffff"
INK, GREY = "#1a1a2e", "#8a8fa8"


def bits_of(mask: Mask, length: int) -> torch.Tensor:
    """Return the mask as a bool tensor (length, length)."""
    return pad_leading(mask.allows(Frame(1, 1, length, length, 0).indices()))[0, 0].expand(length, length)


def by_intervals(bits: torch.Tensor, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the strips of a block with the panels that each computes, from its first visible key to its last."""
    for row in range(first, stop, STRIP):
        last = min(row + STRIP, stop)
        visible = bits[row:last].any(0).nonzero()[:, 0]
        if len(visible):
            yield row, last, int(visible[0]) // PANEL * PANEL, -(-(int(visible[-1]) + 1) // PANEL) * PANEL


def by_tiles(mask: Mask, bits: torch.Tensor, row_tile: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the same for a row of tiles: empty tiles are skipped, partial tiles are limited by their bits."""
    length = len(bits)
    table = tiles(mask, Frame(1, 1, length, length, 0), (TILE, TILE))
    first, stop = row_tile * TILE, min((row_tile + 1) * TILE, length)
    for columns, _ in table.row(0, 0, row_tile):
        for row, last, lo, hi in by_intervals(bits[:, columns], first, stop):
            yield row, last, columns.start + lo, columns.start + hi


class Drawing:
    """An SVG drawing of rectangles and text."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "none", thick: float = 1
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}" '
            f'stroke-width="{thick:g}"/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 13, ink: str = INK, end: str = "start") -> None:
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{end}">{words}</text>'
        )

    def __str__(self) -> str:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *self.parts, "</svg>\n"])


def overview(to: Drawing, bits: torch.Tensor, x: float, y: float, side: float, rows: int, chosen: int) -> None:
    """Draw the whole call by panels, in blocks of `rows` rows, one of them framed."""
    length = len(bits)
    unit = side / length
    for i in range(0, length, PANEL):
        for j in range(0, length, PANEL):
            share = bits[i : i + PANEL, j : j + PANEL].float().mean().item()
            if share:
                to.box(x + j * unit, y + i * unit, PANEL * unit, PANEL * unit, ALL if share == 1 else SOME)
    for i in range(0, length, rows):
        to.box(x, y + i * unit, side, min(rows, length - i) * unit, "none", GREY, 0.7)
    to.box(x, y + chosen * rows * unit, side, rows * unit, "none", INK, 2)


def zoom(
    to: Drawing, bits: torch.Tensor, first: int, stop: int, computed: Iterator[tuple[int, int, int, int]],
    x: float, y: float, width: float, row_height: float,
) -> None:  # fmt: skip
    """Draw the computed strips and panels of some rows, coloured by visibility."""
    length = bits.shape[1]
    unit = width / length
    to.box(x, y, width, (stop - first) * row_height, OUTSIDE, GREY, 0.7)
    for row, last, lo, hi in computed:
        for key in range(lo, min(hi, length), PANEL):
            part = bits[row:last, key : key + PANEL]
            fill = ALL if part.all() else SOME if part.any() else NONE
            to.box(
                x + key * unit,
                y + (row - first) * row_height,
                PANEL * unit,
                (last - row) * row_height,
                fill,
                "#ffffff",
                0.6,
            )
    for key in range(0, length + 1, TILE):
        to.text(x + key * unit, y + (stop - first) * row_height + 14, str(key), 10, GREY, "middle")


def draw() -> str:
    to = Drawing(960, 690)
    mask, length = rg.causal() & rg.window(127, 0), 384
    bits = bits_of(mask, length)
    to.text(20, 26, f"Rows that are intervals: {mask!r}", 15)
    overview(to, bits, 20, 44, 230, BLOCK, 2)
    to.text(20, 292, "8 heads, 384 tokens: blocks of 96 rows", 11, GREY)
    first, stop = 2 * BLOCK, 3 * BLOCK
    zoom(to, bits, first, stop, by_intervals(bits, first, stop), 300, 44, 640, 2.3)
    to.text(300, 292, "one block, rows 192 to 287: 16 strips of 6 rows, each over its own panels of 16 keys", 11, GREY)

    mask, length = rg.causal() & rg.window(140, 0) | rg.global_tokens([0]), 320
    bits = bits_of(mask, length)
    to.text(20, 336, f"Any other mask: {mask!r}", 15)
    overview(to, bits, 20, 362, 230, TILE, 3)
    to.text(20, 610, "tiles of 64 x 64, one row of tiles framed", 11, GREY)
    zoom(to, bits, 3 * TILE, 4 * TILE, by_tiles(mask, bits, 3), 300, 362, 640, 3.45)
    for n, words in enumerate(
        ("partial: bits", "partial: bits", "full: no bits", "partial: bits", "empty: not in the table")
    ):
        to.text(300 + (n + 0.5) * 128, 356, words, 11, GREY, "middle")
    to.text(
        300,
        610,
        "rows 192 to 255: 11 strips; in a partial tile a strip starts at its first bit and stops at its last",
        11,
        GREY,
    )

    for n, (fill, words) in enumerate(
        ((ALL, "computed, all visible"), (SOME, "computed, some hidden (-inf)"), (NONE, "computed, all hidden"),
         (OUTSIDE, "never computed"))
    ):  # fmt: skip
        to.box(20 + n * 235, 644, 18, 18, fill, GREY, 0.7)
        to.text(46 + n * 235, 658, words)
    return str(to)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), "utf-8")
