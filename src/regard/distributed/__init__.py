"""Sequences larger than one machine: every rank of a process group holds a part of the tokens. On torch.distributed."""

from regard.distributed.communication import PeerLost, Traffic, traffic
from regard.distributed.layout import LAYOUTS, Layout, gather, positions, shard
from regard.distributed.plan import BytesMoved, bytes_moved
from regard.distributed.sequence import attention, sequence

__all__ = [
    # the operator, and models under it
    "attention",
    "sequence",
    # who holds what
    "LAYOUTS",
    "Layout",
    "gather",
    "positions",
    "shard",
    # what it moves
    "PeerLost",
    "BytesMoved",
    "Traffic",
    "bytes_moved",
    "traffic",
]
