"""Layouts: which rank holds which tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.distributed.communication import Communicator, Group

LAYOUTS = ("contiguous", "balanced")
Span = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """The spans of tokens that each rank holds, in order.

    "contiguous": rank r of R holds one span of any length, also 0.
    "balanced": rank r holds chunks r and 2R - 1 - r of 2R, so that all ranks have equal work with a causal mask.

    >>> from regard.distributed import Layout
    >>> Layout.even(10, ranks=3).spans
    (((0, 4),), ((4, 7),), ((7, 10),))
    >>> Layout.even(8, ranks=2, layout="balanced").spans
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """

    spans: tuple[tuple[Span, ...], ...]

    @staticmethod
    def even(length: int, ranks: int, layout: str = "contiguous") -> Layout:
        """The most even split of a sequence of this length, which `shard` uses."""
        return _even(length, ranks, check_layout(layout))

    @staticmethod
    def of(lengths: Sequence[int], layout: str = "contiguous") -> Layout:
        """The layout with these numbers of tokens per rank; for "balanced" they must be those of `even`."""
        if check_layout(layout) == "contiguous":
            return Layout(tuple(((a, b),) for a, b in pairwise(accumulate(lengths, initial=0))))
        balanced = Layout.even(sum(lengths), len(lengths), layout)
        if list(balanced.lengths) != list(lengths):
            raise ValueError(
                f"balanced shards of {sum(lengths)} tokens hold {list(balanced.lengths)}, but the ranks hold "
                f"{list(lengths)}; split with regard.distributed.shard(x, layout='balanced')"
            )
        return balanced

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens on each rank."""
        return tuple(sum(b - a for a, b in spans) for spans in self.spans)

    @property
    def length(self) -> int:
        """The number of tokens of the sequence."""
        return sum(self.lengths)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The positions in the sequence of the tokens of a rank, (N_r,)."""
        return torch.cat([torch.arange(a, b, device=device) for a, b in self.spans[rank]])

    def own(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Select the tokens of a rank from the full sequence."""
        parts = [x.narrow(dim, a, b - a) for a, b in self.spans[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the shards of all ranks to the full sequence."""
        pieces: list[tuple[Span, Tensor]] = []
        for part, spans in zip(parts, self.spans, strict=True):
            pieces += zip(spans, part.split([b - a for a, b in spans], dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


@lru_cache(maxsize=256)
def _even(length: int, ranks: int, layout: str) -> Layout:
    chunks = ranks if layout == "contiguous" else 2 * ranks
    edges = list(accumulate((length // chunks + (n < length % chunks) for n in range(chunks)), initial=0))
    spans = list(pairwise(edges))
    if layout == "contiguous":
        return Layout(tuple((span,) for span in spans))
    return Layout(tuple((spans[r], spans[chunks - 1 - r]) for r in range(ranks)))


def check_layout(layout: str) -> str:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}")
    return layout


def shard(x: Tensor, dim: int = 1, *, group: Group | None = None, layout: str = "contiguous") -> Tensor:
    """Select this rank's shard of a sequence that all ranks have: x (B, N, ...) to (B, N_r, ...). Sends nothing.

    Differentiable: the gradient is 0 for the tokens of other ranks, so that the sum over the ranks is the full
    gradient.
    """
    comm = Communicator.of(group)
    return Layout.even(x.shape[dim], comm.ranks, layout).own(x, dim, comm.rank)


def gather(
    x: Tensor, dim: int = 1, *, group: Group | None = None, layout: str = "contiguous", timeout: float | None = None
) -> Tensor:
    """Gather the full sequence on every rank from the shards: (B, N_r, ...) to (B, N, ...).

    Differentiable: the gradient of a shard is the sum over all ranks. With the contiguous layout, shards may have
    different lengths.
    """
    return gather_over(Communicator.of(group, timeout), x, dim, layout)


def gather_over(comm: Communicator, x: Tensor, dim: int, layout: str) -> Tensor:
    """`gather` with a communicator."""
    shards = Layout.of([n for (n,) in comm.all_gather_ints([x.shape[dim]], x.device)], layout)
    return _Gather.apply(x, dim % x.dim(), comm, shards)


def positions(
    length: int, *, group: Group | None = None, layout: str = "contiguous", device: torch.device | str | None = None
) -> Tensor:
    """The positions of this rank's tokens in a sequence of this length, split by `shard`, (N_r,)."""
    comm = Communicator.of(group)
    return Layout.even(length, comm.ranks, layout).positions(comm.rank, device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Communicator, layout: Layout) -> Tensor:
        ctx.given = dim, comm, layout, x.shape
        shapes = [((*x.shape[:dim], n, *x.shape[dim + 1 :]),) for n in layout.lengths]
        received = comm.all_to_all([(x,)] * comm.ranks, shapes)
        return layout.join([part for (part,) in received], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, comm, layout, shape = ctx.given
        parts = [(layout.own(grad, dim, r),) for r in range(comm.ranks)]
        received = comm.all_to_all(parts, [(tuple(shape),)] * comm.ranks)
        total = received[0][0].clone()
        for (part,) in received[1:]:
            total += part
        return total, None, None, None
