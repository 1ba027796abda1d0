"""Hashes in int64 tensors: random choices that depend on a seed and an index only."""

from __future__ import annotations

from torch import Tensor

LOW = 0xFFFFFFFF


def hash32(x: Tensor) -> Tensor:
    """Return the low half of SplitMix64's finaliser; int64 wraps like uint64, except in shifts."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift_right(x, shift)) * to_signed(factor)
    return (x ^ _shift_right(x, 31)) & LOW


def to_signed(word: int) -> int:
    """Return a 64-bit word as a signed integer."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift_right(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)
