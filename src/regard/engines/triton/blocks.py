"""Sizes of the blocks that a program computes, by kernel, architecture and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Blocks(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Compiler options; fused multiply-adds are within the rounding bound."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# By architecture: for widths up to 64, up to 128 and up to 256. Chosen by the registers that the compiler reports; none
# was timed.
FORWARD = {
    "sm_80": (Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2)),
    "sm_90": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2)),
    "sm_100": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2)),
    "gfx9": (Blocks(128, 64, 8, 1), Blocks(128, 64, 8, 1), Blocks(64, 32, 8, 1)),
    "interpreter": (Blocks(32, 64, 4, 1),) * 3,
}
# A bias takes registers too; the others have enough.
FORWARD_WITH_BIAS = FORWARD | {"sm_100": (Blocks(128, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2))}
BACKWARD = {
    "sm_80": (Blocks(32, 64, 4, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "sm_90": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "sm_100": (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "gfx9": (Blocks(64, 64, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1)),
    "interpreter": (Blocks(32, 64, 4, 1),) * 3,
}
# Of few queries, whose keys are split into parts.
DECODE_ROWS = 16
PART_KEYS = 256  # keys of a part at least
DECODE = {
    "sm_80": (Blocks(DECODE_ROWS, 64, 4, 3), Blocks(DECODE_ROWS, 64, 4, 2), Blocks(DECODE_ROWS, 32, 4, 2)),
    "sm_90": (Blocks(DECODE_ROWS, 64, 4, 3), Blocks(DECODE_ROWS, 64, 4, 3), Blocks(DECODE_ROWS, 64, 4, 2)),
    "sm_100": (Blocks(DECODE_ROWS, 64, 4, 3), Blocks(DECODE_ROWS, 64, 4, 3), Blocks(DECODE_ROWS, 64, 4, 2)),
    "gfx9": (Blocks(DECODE_ROWS, 64, 4, 1), Blocks(DECODE_ROWS, 64, 4, 1), Blocks(DECODE_ROWS, 32, 4, 1)),
    "interpreter": (Blocks(DECODE_ROWS, 64, 4, 1),) * 3,
}
# Statistics, weights and maps: queries and keys without values.
INSPECTION = {
    "sm_80": (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2)),
    "sm_90": (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2)),
    "sm_100": (Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2)),
    "gfx9": (Blocks(64, 64, 4, 1), Blocks(64, 64, 8, 1), Blocks(64, 32, 8, 1)),
    "interpreter": (Blocks(32, 64, 4, 1),) * 3,
}
# Without tensor cores: products in float32 unless tf32 is allowed, and the additive score.
SINGLE, ADDITIVE_BACKWARD = Blocks(32, 32, 4, 2), Blocks(32, 16, 4, 2)


def choose(
    table: Mapping[str, tuple[Blocks, ...]], architecture: str, width: int, *, without_cores: Blocks | None, tiles: bool
) -> Blocks:
    """Choose the blocks of a kernel for vectors of this width.

    without_cores: the largest blocks if tensor cores do not compute the products. tiles: blocks may not cross tiles of
    64 rows and keys.
    """
    blocks = table[architecture][0 if width <= 64 else 1 if width <= 128 else 2]
    if without_cores is not None and architecture != "interpreter":
        blocks = without_cores._replace(rows=min(blocks.rows, without_cores.rows))
    if tiles:
        blocks = blocks._replace(rows=min(blocks.rows, 64), keys=min(blocks.keys, 64))
    return blocks


class RecurrenceBlocks(NamedTuple):
    chunk: int  # tokens
    columns: int  # of values and states
    warps: int  # of kernels that walk along the tokens, with all channels
    channels: int  # of queries and keys, in kernels that compute one chunk
    chunk_warps: int

    def walk_options(self) -> dict[str, Any]:
        return {"C": self.chunk, "BE": self.columns, **_options(self.warps)}

    def chunk_options(self) -> dict[str, Any]:
        return {"C": self.chunk, "BD": self.channels, **_options(self.chunk_warps)}


def _options(warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


# For widths of queries and keys up to 64, up to 128 and up to 256, chosen as above.
_WIDE = RecurrenceBlocks(32, 16, 8, 64, 4)
RECURRENCE: dict[str, tuple[RecurrenceBlocks, ...]] = {
    "sm_80": (RecurrenceBlocks(32, 32, 4, 64, 8), RecurrenceBlocks(32, 16, 4, 64, 8), _WIDE._replace(chunk_warps=8)),
    "sm_90": (RecurrenceBlocks(64, 32, 4, 64, 8), _WIDE, _WIDE),
    "sm_100": (RecurrenceBlocks(64, 32, 4, 64, 8), _WIDE, _WIDE),
    "gfx9": (RecurrenceBlocks(32, 32, 4, 64, 4),) * 2 + (RecurrenceBlocks(32, 16, 4, 32, 4),),
    "interpreter": (RecurrenceBlocks(16, 32, 4, 32, 4),) * 3,
}
FEW_TOKENS = 16


def choose_recurrence(architecture: str, tokens: int, width: int, *, short: bool) -> RecurrenceBlocks:
    """Choose the blocks of the recurrence for queries and keys of this width.

    short: chunks have at most 32 tokens, since their products do not use tensor cores.
    """
    blocks = RECURRENCE[architecture][0 if width <= 64 else 1 if width <= 128 else 2]
    most = FEW_TOKENS if tokens <= FEW_TOKENS else 32 if short else blocks.chunk
    return blocks._replace(chunk=min(blocks.chunk, most))
