"""Hashes in int64 tensors: random choices that depend on a seed and a place, and on nothing else."""

from __future__ import annotations

from torch import Tensor

LOW = 0xFFFFFFFF


def hash32(x: Tensor) -> Tensor:
    """The low half of SplitMix64's finaliser; int64 wraps as uint64 does, only its shifts need care."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * signed(factor)
    return (x ^ _shifted(x, 31)) & LOW


def signed(word: int) -> int:
    """A 64-bit word as int64 holds it."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)
