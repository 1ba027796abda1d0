"""What is sent to whom: the keys that the mask lets a rank's queries see, asked of the mask's own tiles.

Every rank works it out for all of them, from the same description and the same lengths, so that what one sends another
awaits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from regard.attention import Attention
from regard.cache import CACHE
from regard.distributed.description import full_frame
from regard.distributed.layout import Layout, Span
from regard.geometry import CallSlice, Frame
from regard.masks import Mask, tiles

SIDE = 64  # tiles that a span is looked at in, at most
PORTION = 1 << 20  # bytes of keys and values that go round at a time
METHODS = ("ring", "heads")


@dataclass(frozen=True)
class Sizes:
    """The whole call: its axes, the bytes of a number, and what is differentiated."""

    B: int
    H: int
    G: int
    D: int
    E: int
    bytes: int
    grad: bool = False  # whether there is a backward pass
    grad_keys: bool = False  # whether it has gradients of keys and values


@dataclass(frozen=True)
class Block:
    """Some neighbouring queries and keys, by their places in the whole sequence: one call of an engine."""

    rows: Span
    columns: Span


@dataclass(frozen=True)
class Plan:
    """For every rank of queries t and rank of keys r: `blocks[t][r]` to compute, and `pieces[t][r]` of keys to send."""

    queries: Layout
    keys: Layout
    blocks: tuple[tuple[tuple[Block, ...], ...], ...]
    pieces: tuple[tuple[tuple[Span, ...], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    def count(self, t: int, r: int) -> int:
        """How many keys of rank r the queries of rank t need."""
        return sum(b - a for a, b in self.pieces[t][r])

    def ring_bytes(self, sizes: Sizes) -> list[int]:
        """What each rank sends by the ring: its keys and values to who needs them; backward again, and gradients."""
        each = sizes.B * sizes.G * (sizes.D + sizes.E) * sizes.bytes
        sent = [0] * self.ranks
        for t in range(self.ranks):
            for r in range(self.ranks):
                if t != r:
                    sent[r] += self.count(t, r) * each * (2 if sizes.grad else 1)
                    sent[t] += self.count(t, r) * each * sizes.grad_keys
        return sent

    def head_bytes(self, sizes: Sizes) -> list[int]:
        """What each rank sends by the exchange of heads: tokens of others' heads, and outputs back; and backward."""
        query, key = sizes.H // self.ranks * sizes.B * sizes.bytes, sizes.G // self.ranks * sizes.B * sizes.bytes
        both = sizes.D + sizes.E
        sent = []
        for own_q, own_k in zip(self.queries.lengths, self.keys.lengths, strict=True):
            other_q, other_k, others = self.queries.length - own_q, self.keys.length - own_k, self.ranks - 1
            forward = others * (own_q * query * sizes.D + own_k * key * both) + other_q * query * sizes.E
            backward = others * own_q * query * sizes.E + other_q * query * sizes.D + other_k * key * both
            sent.append(forward + backward * sizes.grad)
        return sent

    def choose(self, how: str | None, sizes: Sizes) -> str:
        """The way that was asked for, or the one that moves fewer bytes over the busiest rank."""
        if how is not None and how not in METHODS:
            raise ValueError(f"how must be one of {', '.join(METHODS)}, or None, but is {how!r}")
        if how == "heads" and sizes.G % self.ranks:
            raise ValueError(
                f"how='heads' needs key/value heads G that are a multiple of the {self.ranks} ranks, but G is "
                f"{sizes.G}; use how='ring'"
            )
        if how is not None:
            return how
        if sizes.G % self.ranks or not sizes.G or self.ranks == 1:
            return "ring"
        return "heads" if max(self.head_bytes(sizes)) < max(self.ring_bytes(sizes)) else "ring"


def portion(sizes: Sizes, keys: int, described: int = 0) -> int:
    """How many heads of a shard of so many keys go round at a time, so that what is on its way stays small.

    One at least, and as much as the description itself holds in bytes, whose gradients every turn adds up whole.

    >>> portion(Sizes(B=1, H=8, G=8, D=64, E=64, bytes=4), keys=1024), portion(Sizes(1, 8, 8, 64, 64, 4), keys=65536)
    (2, 1)
    """
    each = sizes.B * keys * (sizes.D + sizes.E) * sizes.bytes
    return max(1, min(sizes.G, max(PORTION, described) // max(1, each)))


def plan(mask: Mask | None, frame: Frame, queries: Layout, keys: Layout) -> Plan:
    """The plan of a call whose tokens are split like this, remembered by the mask's content."""
    mask, key = None if mask is None else mask.snapshot(), frame.cache_key()
    content = "all" if mask is None else mask.content()
    known = None if content is None else ("ring", content, key, queries, keys)
    return CACHE.get_or_build(known, lambda: _plan(mask, key, queries, keys), owner=mask)


def _plan(mask: Mask | None, key: tuple, queries: Layout, keys: Layout) -> Plan:
    B, H, Q, K, offsets = key
    frame = Frame(B, H, Q, K, offsets[0] if len(offsets) == 1 else torch.tensor(offsets, dtype=torch.int64))
    blocks, pieces = [], []
    for rows in queries.spans:
        blocks_of, pieces_of = [], []
        for columns in keys.spans:
            found, held = [], []
            for span in columns:
                visible = [(row, part) for row in rows if (part := _visible_span(mask, frame, row, span)) is not None]
                found += [Block(row, part) for row, part in visible]
                if visible:
                    held.append((min(a for _, (a, _) in visible), max(b for _, (_, b) in visible)))
            blocks_of.append(tuple(found))
            pieces_of.append(tuple(held))
        blocks.append(tuple(blocks_of))
        pieces.append(tuple(pieces_of))
    return Plan(queries, keys, tuple(blocks), tuple(pieces))


def _visible_span(mask: Mask | None, frame: Frame, rows: Span, columns: Span) -> Span | None:
    """The keys of a span from the first to the last that any of some queries may see."""
    (top, bottom), (left, right) = rows, columns
    if top == bottom or left == right or not frame.B or not frame.H:
        return None
    if mask is None:
        return columns
    part = mask.narrow(frame, CallSlice(slice(0, frame.H), slice(top, bottom), slice(left, right)))
    here = Frame(frame.B, frame.H, bottom - top, right - left, frame.offset + top - left)
    size = max(16, -(-max(here.Q, here.K) // SIDE))
    table = tiles(part, here, (size, size))
    if not len(table.start):
        return None
    return left + int(table.start.min()) * size, left + min(int(table.stop.max()) * size, here.K)


@dataclass(frozen=True)
class BytesMoved:
    """How a call is computed, "ring" or "heads", and the bytes that each rank sends."""

    how: str
    sent: tuple[int, ...]


def bytes_moved(
    attend: Attention,
    *,
    ranks: int,
    B: int,
    H: int,
    Q: int | Sequence[int],
    D: int,
    K: int | Sequence[int] | None = None,
    G: int | None = None,
    E: int | None = None,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    how: str | None = None,
    backward: bool = True,
) -> BytesMoved:
    """The bytes that each rank sends in one call, to the byte, without a process group: what a plan needs.

    Q and K are whole lengths, split evenly, or one length a rank. K, G and E are Q, H and D unless told otherwise.

    >>> import regard as rg
    >>> from regard.distributed import bytes_moved
    >>> whole = bytes_moved(rg.Attention(), ranks=4, B=1, H=8, Q=4096, D=64, backward=False)
    >>> near = bytes_moved(rg.Attention(mask=rg.window(64, 0)), ranks=4, B=1, H=8, Q=4096, D=64, backward=False)
    >>> whole.how, max(whole.sent), near.how, max(near.sent)
    ('heads', 6291456, 'ring', 262144)
    """
    queries, keys = (
        Layout.even(n, ranks, layout) if isinstance(n, int) else Layout.of(list(n), layout)
        for n in (Q, Q if K is None else K)
    )
    sizes = Sizes(B, H, H if G is None else G, D, D if E is None else E, dtype.itemsize, backward, backward)
    assert attend.mask is None or isinstance(attend.mask, Mask)
    found = plan(attend.mask, full_frame(attend, B, H, queries.length, keys.length), queries, keys)
    way = found.choose(how, sizes)
    return BytesMoved(way, tuple(found.ring_bytes(sizes) if way == "ring" else found.head_bytes(sizes)))
