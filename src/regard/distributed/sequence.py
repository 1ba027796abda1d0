"""Attention, modules and models on a sequence that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.distributed.communication import Communicator, Group
from regard.distributed.layout import Layout, check_layout, gather_over
from regard.distributed.plan import METHODS
from regard.distributed.sharded_attention import sharded_attention
from regard.sharding import use_sharding


@contextmanager
def sequence(
    group: Group | None = None, *, layout: str = "contiguous", method: str | None = None, timeout: float | None = None
) -> Iterator[None]:
    """Context in which modules and models compute on this rank's tokens, and attention on those of all ranks.

    A model takes full inputs (ids, masks, packed batches; the same on every rank). If its result has a row per token
    (language models, encoders), it returns the rows of this rank, which `gather` joins; for packed inputs they are
    (1, N_r, ...). Other models return their full result on every rank. A module such as `MultiHeadAttention` takes and
    returns this rank's tokens (B, N_r, d_model); its masks describe the full sequence. The arguments are those of
    `attention`.

    Gradients of parameters are those of this rank's shard: their sum over the ranks is the gradient of the sum of
    the ranks' losses. With activation checkpointing, call backward inside the context too.
    """
    if method is not None and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, or None, but is {method!r}")
    with use_sharding(_SequenceSharding(Communicator.of(group, timeout), check_layout(layout), method)):
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = None,
    layout: str = "contiguous",
    method: str | None = None,
    timeout: float | None = None,
    engine: str | None = None,
    return_lse: bool = False,
    **description: Any,
) -> Any:
    """`regard.attention` on a sequence that is split over the ranks of a group, exact, forward and backward.

    Every rank passes its tokens, query (B, H, Q_r, D), key (B, G, K_r, D), value (B, G, K_r, E), and gets the outputs
    of its queries (B, H, Q_r, E). The description is that of the full sequence, the same on every rank: masks, biases,
    offset and lengths refer to positions in the full sequence.

    layout: how the tokens are split, "contiguous" (any lengths, also 0) or "balanced" (see `Layout`).
    method: "ring" sends keys and values from rank to rank, "heads" exchanges tokens for heads (G must be a multiple of
        the ranks). By default, the one that sends fewer bytes on the busiest rank, and the ring if they are equal.
    timeout: seconds to wait for another rank; by default that of the group.

    Tensors of the description (scale, tables, weights, sink, dense bias) get the gradients of this rank's shard only:
    their sum over the ranks is the gradient of the sum of the ranks' losses. Each rank draws dropout from its
    generator: it is reproducible from the same seeds, but differs from the bits that one process draws.
    """
    with sequence(group, layout=layout, method=method, timeout=timeout):
        return Attention(**description)(query, key, value, engine=engine, return_lse=return_lse)


@dataclass(frozen=True, eq=False)
class _SequenceSharding:
    """The sharding that modules find by `regard.sharding.sharding`."""

    comm: Communicator
    layout: str
    method: str | None

    def attend(
        self, attend: Attention, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None, return_lse: bool
    ) -> Any:
        return sharded_attention(
            self.comm,
            attend,
            query,
            key,
            value,
            layout=self.layout,
            method=self.method,
            engine=engine,
            return_lse=return_lse,
        )

    def to_local(self, x: Tensor, dim: int) -> Tensor:
        return Layout.even(x.shape[dim], self.comm.ranks, self.layout).own(x, dim, self.comm.rank)

    def full_tensor(self, x: Tensor, dim: int) -> Tensor:
        return gather_over(self.comm, x, dim, self.layout)

    def positions(self, count: int, device: torch.device) -> Tensor:
        layout = Layout.of([n for (n,) in self.comm.all_gather_ints([count], device)], self.layout)
        return layout.positions(self.comm.rank, device)
