"""Attention over a sequence of which every rank holds a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.distributed.wire import Group


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

    Every rank calls it with its own tokens, query (B, H, Q_r, D), key (B, G, K_r, D), value (B, G, K_r, E), and gets the
    outputs of its queries (B, H, Q_r, E). The description is that of the whole sequence, the same on every rank:
    masks, biases, offset and lengths speak of whole positions.

    layout: how the tokens are split, "contiguous" (any lengths, also none) or "balanced" (see `shard`).
    how: "ring" sends keys and values round, "heads" exchanges heads for tokens (G must be a multiple of the ranks);
        left out, the one that moves fewer bytes over the busiest rank, and the ring where they are even.
    timeout: seconds to wait for another rank; none is the group's own.

    Tensors of the description (scale, tables, weights, sink, dense bias) get the gradients of this rank's part alone:
    their sum over the ranks is the gradient of the sum of the ranks' losses.
    """
    raise NotImplementedError
