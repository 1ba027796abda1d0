"""Batches of similar token counts from sequences of similar length, reproducible from seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regard.nn import Packed


class Ragged:
    """Concatenated sequences of integers or of feature vectors, stored without padding.

    >>> import numpy as np
    >>> rows = Ragged([np.array([5, 6, 7]), np.array([8, 9])])
    >>> rows.lengths, rows.pack(np.array([1, 0])).values
    (array([3, 2]), tensor([8, 9, 5, 6, 7]))
    """

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.edges = np.concatenate([[0], np.cumsum(self.lengths)])
        values = np.concatenate(rows) if len(rows) else np.zeros(0, np.int64)
        self.values = values if np.issubdtype(values.dtype, np.floating) else values.astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> np.ndarray:
        return self.values[self.edges[at] : self.edges[at + 1]]

    def pack(self, chosen: np.ndarray) -> Packed:
        """Pack the chosen sequences into one batch."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        # Token n of the batch is value n + shift, with one shift per sequence.
        at = np.arange(ends[-1]) + np.repeat(self.edges[chosen] - (ends - lengths), lengths)
        return Packed(torch.from_numpy(self.values[at]), tuple(lengths.tolist()))


def plan(sizes: np.ndarray, *, budget: int, seed: int, epoch: int, pool: int = 16) -> list[np.ndarray]:
    """Plan the batches of an epoch: arrays of indices of examples whose sizes sum to about `budget`.

    Every example is used once. Examples are shuffled, sorted by size within groups of `pool` batches, and the batches
    are shuffled again. The plan depends only on the arguments, so that a resumed run continues with the same batches.

    >>> import numpy as np
    >>> sorted(np.concatenate(plan(np.array([3, 1, 2, 2, 1, 3]), budget=4, seed=1, epoch=0)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(sizes))
    batches: list[np.ndarray] = []
    for part in _divide(order, sizes, budget * pool):
        batches += _divide(part[np.argsort(sizes[part], kind="stable")], sizes, budget)
    return [batches[n] for n in random.permutation(len(batches))]


def shards(chosen: np.ndarray, sizes: np.ndarray, count: int) -> list[np.ndarray]:
    """Divide a batch into `count` parts of similar token counts, for processes or gradient accumulation."""
    if count == 1:
        return [chosen]
    parts = _parts(chosen, np.cumsum(sizes[chosen]), sizes[chosen], count)
    return parts + [chosen[:0]] * (count - len(parts))


def in_order(sizes: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """Batches for evaluation, longest sequences first, so that running out of memory fails early."""
    return _divide(np.argsort(-sizes, kind="stable"), sizes, budget)


def _divide(order: np.ndarray, sizes: np.ndarray, budget: int) -> list[np.ndarray]:
    """Divide into parts of about `budget`, as even as possible, to avoid a small last batch."""
    ends = np.cumsum(sizes[order])
    total = int(ends[-1]) if len(ends) else 0
    return _parts(order, ends, sizes[order], max(1, round(total / budget)))


def _parts(order: np.ndarray, ends: np.ndarray, sizes: np.ndarray, count: int) -> list[np.ndarray]:
    middle = ends - sizes / 2  # an example belongs to the part that contains its midpoint
    which = np.minimum((middle * count / max(1, ends[-1] if len(ends) else 1)).astype(np.int64), count - 1)
    return [part for part in np.split(order, np.flatnonzero(np.diff(which)) + 1) if len(part)]
