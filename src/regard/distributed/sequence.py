"""Modules and models over a sequence of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regard.distributed.wire import Group


@contextmanager
def sequence(
    group: Group | None = None, *, layout: str = "contiguous", how: str | None = None, timeout: float | None = None
) -> Iterator[None]:
    """Within, modules and models compute on this rank's tokens, and every attention looks at those of all ranks.

    A model takes whole inputs (ids, masks, packed batches; the same on every rank). One whose result has a row for every
    token (language models, encoders) gives the rows of this rank, which `gather` joins; others give their whole
    result on every rank. A module such as `MultiHeadAttention` takes this rank's tokens (B, N_r, d_model) and gives the
    same; its masks speak of the whole sequence.

    Gradients of parameters are those of this rank's part: their sum over the ranks is the gradient of the sum of
    the ranks' losses.
    """
    raise NotImplementedError
    yield
