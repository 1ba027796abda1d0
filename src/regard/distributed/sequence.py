"""Attention, modules and models over a sequence of which every rank holds a part."""

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
    group: Group | None = None, *, layout: str = "contiguous", how: str | None = None, timeout: float | None = None
) -> Iterator[None]:
    """Within, modules and models compute on this rank's tokens, and every attention looks at those of all ranks.

    A model takes whole inputs (ids, masks, packed batches; the same on every rank). One whose result has a row for
    every token (language models, encoders) gives the rows of this rank, which `gather` joins, (1, N_r, ...) of packed
    inputs; others give their whole result on every rank. A module such as `MultiHeadAttention` takes this rank's
    tokens (B, N_r, d_model) and gives the same; its masks speak of the whole sequence. The arguments are those of
    `attention`.

    Gradients of parameters are those of this rank's part: their sum over the ranks is the gradient of the sum of
    the ranks' losses. Where activations are checkpointed, backward belongs within, too.
    """
    if how is not None and how not in METHODS:
        raise ValueError(f"how must be one of {', '.join(METHODS)}, or None, but is {how!r}")
    with use_sharding(_SequenceSharding(Communicator.of(group, timeout), check_layout(layout), how)):
        yield


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group | None = None,
    layout: str = "contiguous",
    how: str | None = None,
    timeout: float | None = None,
    engine: str | None = None,
    return_lse: bool = False,
    **description: Any,
) -> Any:
    """`regard.attention` on a sequence that is split over the ranks of a group, exact, forward and backward.

    Every rank calls it with its own tokens, query (B, H, Q_r, D), key (B, G, K_r, D), value (B, G, K_r, E), and gets
    the outputs of its queries (B, H, Q_r, E). The description is that of the whole sequence, the same on every rank:
    masks, biases, offset and lengths speak of whole positions.

    layout: how the tokens are split, "contiguous" (any lengths, also none) or "balanced" (see `shard`).
    how: "ring" sends keys and values round, "heads" exchanges heads for tokens (G must be a multiple of the ranks);
        left out, the one that moves fewer bytes over the busiest rank, and the ring where they are even.
    timeout: seconds to wait for another rank; none is the group's own.

    Tensors of the description (scale, tables, weights, sink, dense bias) get the gradients of this rank's part alone:
    their sum over the ranks is the gradient of the sum of the ranks' losses. Dropout is drawn by each rank from its own
    generator: right, and the same again from the same seeds, but not the bits that one process draws.
    """
    with sequence(group, layout=layout, how=how, timeout=timeout):
        return Attention(**description)(query, key, value, engine=engine, return_lse=return_lse)


@dataclass(frozen=True, eq=False)
class _SequenceSharding:
    """What `regard.sharding.sharding` tells the modules."""

    comm: Communicator
    layout: str
    how: str | None

    def attend(
        self, attend: Attention, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None, return_lse: bool
    ) -> Any:
        return sharded_attention(
            self.comm, attend, query, key, value, layout=self.layout, how=self.how, engine=engine, return_lse=return_lse
        )

    def to_local(self, x: Tensor, dim: int) -> Tensor:
        return Layout.even(x.shape[dim], self.comm.ranks, self.layout).own(x, dim, self.comm.rank)

    def full_tensor(self, x: Tensor, dim: int) -> Tensor:
        return gather_over(self.comm, x, dim, self.layout)

    def positions(self, count: int, device: torch.device) -> Tensor:
        held = Layout.of([n for (n,) in self.comm.all_gather_ints([count], device)], self.layout)
        return held.positions(self.comm.rank, device)
