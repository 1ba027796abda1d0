"""Sequence parallelism on torch.distributed: every rank of a process group holds a shard of the tokens."""

from regard.distributed.communication import PeerLost, Traffic, traffic
from regard.distributed.layout import LAYOUTS, Layout, gather, positions, shard
from regard.distributed.plan import BytesMoved, bytes_moved
from regard.distributed.sequence import attention, sequence

__all__ = [
    # the operator, and models in a context
    "attention",
    "sequence",
    # layouts of the tokens
    "LAYOUTS",
    "Layout",
    "gather",
    "positions",
    "shard",
    # communication
    "PeerLost",
    "BytesMoved",
    "Traffic",
    "bytes_moved",
    "traffic",
]
