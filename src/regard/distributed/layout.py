"""Who holds which tokens of a sequence."""

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
    """The spans of tokens that each rank holds, one behind the other.

    "contiguous": rank r of R holds one span; any lengths, also 0.
    "balanced": rank r holds chunks r and 2R - 1 - r of 2R, so that every rank has as much work under a causal mask.

    >>> from regard.distributed import Layout
    >>> Layout.even(10, ranks=3).spans
    (((0, 4),), ((4, 7),), ((7, 10),))
    >>> Layout.even(8, ranks=2, layout="balanced").spans
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """

    spans: tuple[tuple[Span, ...], ...]

    @staticmethod
    def even(length: int, ranks: int, layout: str = "contiguous") -> Layout:
        """A sequence of this length, split as evenly as it goes: what `shard` does."""
        return _even(length, ranks, check_layout(layout))

    @staticmethod
    def of(lengths: Sequence[int], layout: str = "contiguous") -> Layout:
        """The layout in which the ranks hold so many tokens; a balanced one must be what `even` gives."""
        if check_layout(layout) == "contiguous":
            return Layout(tuple(((a, b),) for a, b in pairwise(accumulate(lengths, initial=0))))
        made = Layout.even(sum(lengths), len(lengths), layout)
        if list(made.lengths) != list(lengths):
            raise ValueError(
                f"balanced shards of {sum(lengths)} tokens hold {list(made.lengths)}, but the ranks hold "
                f"{list(lengths)}; split by regard.distributed.shard(x, layout='balanced')"
            )
        return made

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(sum(b - a for a, b in spans) for spans in self.spans)

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return sum(self.lengths)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Where the tokens of a rank stand in the sequence, (N,)."""
        return torch.cat([torch.arange(a, b, device=device) for a, b in self.spans[rank]])

    def own(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The tokens of a rank, from the whole."""
        parts = [x.narrow(dim, a, b - a) for a, b in self.spans[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole, from the tokens of every rank."""
        pieces: list[tuple[Span, Tensor]] = []
        for part, spans in zip(parts, self.spans, strict=True):
            pieces += zip(spans, part.split([b - a for a, b in spans], dim), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda found: found[0])], dim)


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
    """This rank's tokens of a sequence that every rank has whole: x (B, N, ...) to (B, N_r, ...). Nothing is sent.

    Differentiable: the gradient of the whole is 0 where other ranks hold the tokens, so that the sum over the ranks is
    the whole gradient.
    """
    comm = Communicator.of(group)
    return Layout.even(x.shape[dim], comm.ranks, layout).own(x, dim, comm.rank)


def gather(
    x: Tensor, dim: int = 1, *, group: Group | None = None, layout: str = "contiguous", timeout: float | None = None
) -> Tensor:
    """The whole sequence on every rank, from the tokens that each holds: (B, N_r, ...) to (B, N, ...).

    Differentiable: a rank's gradient is the sum of what all ranks do with its tokens. Lengths may be uneven where the
    layout is contiguous.
    """
    return gather_over(Communicator.of(group, timeout), x, dim, layout)


def gather_over(comm: Communicator, x: Tensor, dim: int, layout: str) -> Tensor:
    """The same over a wire."""
    held = Layout.of([n for (n,) in comm.all_gather_ints([x.shape[dim]], x.device)], layout)
    return _Gather.apply(x, dim % x.dim(), comm, held)


def positions(
    length: int, *, group: Group | None = None, layout: str = "contiguous", device: torch.device | str | None = None
) -> Tensor:
    """Where this rank's tokens stand in a sequence of this length that `shard` has split, (N_r,)."""
    comm = Communicator.of(group)
    return Layout.even(length, comm.ranks, layout).positions(comm.rank, device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Communicator, held: Layout) -> Tensor:
        ctx.given = dim, comm, held, x.shape
        shapes = [((*x.shape[:dim], n, *x.shape[dim + 1 :]),) for n in held.lengths]
        found = comm.all_to_all([(x,)] * comm.ranks, shapes)
        return held.join([part for (part,) in found], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, comm, held, shape = ctx.given
        parts = [(held.own(grad, dim, r),) for r in range(comm.ranks)]
        found = comm.all_to_all(parts, [(tuple(shape),)] * comm.ranks)
        total = found[0][0].clone()
        for (part,) in found[1:]:
            total += part
        return total, None, None, None
