"""Which examples a step takes: batches of about as many tokens, of like lengths, the same for a seed and an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regard.nn import Packed


class Ragged:
    """Sequences end to end, of whole numbers or of rows of numbers, so that many cost no more than their tokens.

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
        """The chosen sequences as a packed batch."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        # Token n of the batch is value n + shift, and the shift is one for each sequence.
        at = np.arange(ends[-1]) + np.repeat(self.edges[chosen] - (ends - lengths), lengths)
        return Packed(torch.from_numpy(self.values[at]), tuple(lengths.tolist()))


def plan(sizes: np.ndarray, *, budget: int, seed: int, epoch: int, pool: int = 16) -> list[np.ndarray]:
    """The batches of an epoch, each the places of examples whose sizes sum to about `budget`.

    Every example comes once. Of each `pool` batches, taken at random, those of like size go together; then the batches
    are shuffled. It depends on nothing but the arguments, so a run goes on where it stopped.

    >>> import numpy as np
    >>> sorted(np.concatenate(plan(np.array([3, 1, 2, 2, 1, 3]), budget=4, seed=1, epoch=0)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(sizes))
    batches: list[np.ndarray] = []
    for part in _cut(order, sizes, budget * pool):
        batches += _cut(part[np.argsort(sizes[part], kind="stable")], sizes, budget)
    return [batches[n] for n in random.permutation(len(batches))]


def shards(chosen: np.ndarray, sizes: np.ndarray, count: int) -> list[np.ndarray]:
    """A batch in `count` parts of about as many tokens: what each process takes, or each step of accumulation."""
    if count == 1:
        return [chosen]
    parts = _parts(chosen, np.cumsum(sizes[chosen]), sizes[chosen], count)
    return parts + [chosen[:0]] * (count - len(parts))


def in_order(sizes: np.ndarray, *, budget: int) -> list[np.ndarray]:
    """Batches for evaluation: the longest first, so that too large a batch fails at once."""
    return _cut(np.argsort(-sizes, kind="stable"), sizes, budget)


def _cut(order: np.ndarray, sizes: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut into parts of about the budget, as even as can be: a small rest would be a step of its own."""
    ends = np.cumsum(sizes[order])
    total = int(ends[-1]) if len(ends) else 0
    return _parts(order, ends, sizes[order], max(1, round(total / budget)))


def _parts(order: np.ndarray, ends: np.ndarray, sizes: np.ndarray, count: int) -> list[np.ndarray]:
    middle = ends - sizes / 2  # an example goes where its middle falls
    which = np.minimum((middle * count / max(1, ends[-1] if len(ends) else 1)).astype(np.int64), count - 1)
    return [part for part in np.split(order, np.flatnonzero(np.diff(which)) + 1) if len(part)]
