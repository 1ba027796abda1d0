"""What is sent to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.attention import Attention


@dataclass(frozen=True)
class Moved:
    """How a call is computed, "ring" or "heads", and the bytes that each rank sends."""

    how: str
    sent: tuple[int, ...]


def bytes_moved(
    attend: Attention,
    *,
    ranks: int,
    B: int,
    H: int,
    Q: int | Sequence[int],
    D: int,
    K: int | Sequence[int] | None = None,
    G: int | None = None,
    E: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    how: str | None = None,
    backward: bool = True,
) -> Moved:
    """The bytes that each rank sends in one call, to the byte, without a process group: what a plan needs.

    Q and K are whole lengths, split evenly, or one length a rank. K, G and E are Q, H and D unless told otherwise.
    """
    raise NotImplementedError
