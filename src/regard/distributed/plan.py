"""The communication plan: which keys each rank sends to each other rank, from the tiles of the mask.

Every rank computes the plan of all ranks from the same description and lengths, so that sends and receives match.
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

SIDE = 64  # maximum tiles per side of a span
PORTION = 1 << 20  # bytes of keys and values per ring transfer
METHODS = ("ring", "heads")


@dataclass(frozen=True)
class Sizes:
    """The full call: its axes, the bytes per number, and which gradients are needed."""

    B: int
    H: int
    G: int
    D: int
    E: int
    bytes: int
    grad: bool = False  # whether there is a backward pass
    grad_keys: bool = False  # whether keys or values require grad


@dataclass(frozen=True)
class Block:
    """A span of queries and a span of keys, by positions in the full sequence: one call of an engine."""

    rows: Span
    columns: Span


@dataclass(frozen=True)
class Plan:
    """For the queries of rank t and the keys of rank r: `blocks[t][r]` to compute, and spans `pieces[t][r]` of keys to
    send."""

    queries: Layout
    keys: Layout
    blocks: tuple[tuple[tuple[Block, ...], ...], ...]
    pieces: tuple[tuple[tuple[Span, ...], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.blocks)

    def count(self, t: int, r: int) -> int:
        """The number of keys of rank r that the queries of rank t need."""
        return sum(b - a for a, b in self.pieces[t][r])

    def ring_bytes(self, sizes: Sizes) -> list[int]:
        """Bytes that each rank sends with the ring: keys and values, in backward again, and their gradients."""
        each = sizes.B * sizes.G * (sizes.D + sizes.E) * sizes.bytes
        sent = [0] * self.ranks
        for t in range(self.ranks):
            for r in range(self.ranks):
                if t != r:
                    sent[r] += self.count(t, r) * each * (2 if sizes.grad else 1)
                    sent[t] += self.count(t, r) * each * sizes.grad_keys
        return sent

    def head_bytes(self, sizes: Sizes) -> list[int]:
        """Bytes that each rank sends with the exchange of heads: q, k, v and outputs, forward and backward."""
        query, key = sizes.H // self.ranks * sizes.B * sizes.bytes, sizes.G // self.ranks * sizes.B * sizes.bytes
        both = sizes.D + sizes.E
        sent = []
        for own_q, own_k in zip(self.queries.lengths, self.keys.lengths, strict=True):
            other_q, other_k, others = self.queries.length - own_q, self.keys.length - own_k, self.ranks - 1
            forward = others * (own_q * query * sizes.D + own_k * key * both) + other_q * query * sizes.E
            backward = others * own_q * query * sizes.E + other_q * query * sizes.D + other_k * key * both
            sent.append(forward + backward * sizes.grad)
        return sent

    def choose(self, method: str | None, sizes: Sizes) -> str:
        """Return `method` if it is given, else the one with fewer bytes on the busiest rank."""
        if method is not None and method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, or None, but is {method!r}")
        if method == "heads" and sizes.G % self.ranks:
            raise ValueError(
                f"method='heads' needs key/value heads G that are a multiple of the {self.ranks} ranks, but G is "
                f"{sizes.G}; use method='ring'"
            )
        if method is not None:
            return method
        if sizes.G % self.ranks or not sizes.G or self.ranks == 1:
            return "ring"
        return "heads" if max(self.head_bytes(sizes)) < max(self.ring_bytes(sizes)) else "ring"


def portion(sizes: Sizes, keys: int, described: int = 0) -> int:
    """The number of key/value heads per ring transfer, for shards of `keys` keys.

    A transfer has at least one head, and about `PORTION` bytes or as many as the tensors of the description, if those
    are more (`described`): their gradients are accumulated in full at each step.

    >>> portion(Sizes(B=1, H=8, G=8, D=64, E=64, bytes=4), keys=1024), portion(Sizes(1, 8, 8, 64, 64, 4), keys=65536)
    (2, 1)
    """
    each = sizes.B * keys * (sizes.D + sizes.E) * sizes.bytes
    return max(1, min(sizes.G, max(PORTION, described) // max(1, each)))


def plan(mask: Mask | None, frame: Frame, queries: Layout, keys: Layout) -> Plan:
    """The plan of a call with these layouts, cached by the content of the mask."""
    mask, key = None if mask is None else mask.snapshot(), frame.cache_key()
    content = "all" if mask is None else mask.content()
    cache_key = None if content is None else ("ring", content, key, queries, keys)
    return CACHE.get_or_build(cache_key, lambda: _plan(mask, key, queries, keys), owner=mask)


def _plan(mask: Mask | None, key: tuple, queries: Layout, keys: Layout) -> Plan:
    B, H, Q, K, offsets = key
    frame = Frame(B, H, Q, K, offsets[0] if len(offsets) == 1 else torch.tensor(offsets, dtype=torch.int64))
    blocks, pieces = [], []
    for rows in queries.spans:
        blocks_of, pieces_of = [], []
        for columns in keys.spans:
            visible_blocks, needed = [], []
            for span in columns:
                visible = [(row, part) for row in rows if (part := _visible_span(mask, frame, row, span)) is not None]
                visible_blocks += [Block(row, part) for row, part in visible]
                if visible:
                    needed.append((min(a for _, (a, _) in visible), max(b for _, (_, b) in visible)))
            blocks_of.append(tuple(visible_blocks))
            pieces_of.append(tuple(needed))
        blocks.append(tuple(blocks_of))
        pieces.append(tuple(pieces_of))
    return Plan(queries, keys, tuple(blocks), tuple(pieces))


def _visible_span(mask: Mask | None, frame: Frame, rows: Span, columns: Span) -> Span | None:
    """The part of a span of keys from the first to the last key that any of the queries may attend to."""
    (top, bottom), (left, right) = rows, columns
    if top == bottom or left == right or not frame.B or not frame.H:
        return None
    if mask is None:
        return columns
    narrowed = mask.narrow(frame, CallSlice(slice(0, frame.H), slice(top, bottom), slice(left, right)))
    here = Frame(frame.B, frame.H, bottom - top, right - left, frame.offset + top - left)
    size = max(16, -(-max(here.Q, here.K) // SIDE))
    table = tiles(narrowed, here, (size, size))
    if not len(table.start):
        return None
    return left + int(table.start.min()) * size, left + min(int(table.stop.max()) * size, here.K)


@dataclass(frozen=True)
class BytesMoved:
    """The method of a call, "ring" or "heads", and the bytes that each rank sends."""

    method: str
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
    method: str | None = None,
    backward: bool = True,
) -> BytesMoved:
    """The exact number of bytes that each rank sends in one call, computed without a process group.

    Q and K are full lengths, split evenly, or lists with one length per rank. K, G and E default to Q, H and D.

    >>> import regard as rg
    >>> from regard.distributed import bytes_moved
    >>> full = bytes_moved(rg.Attention(), ranks=4, B=1, H=8, Q=4096, D=64, backward=False)
    >>> local = bytes_moved(rg.Attention(mask=rg.window(64, 0)), ranks=4, B=1, H=8, Q=4096, D=64, backward=False)
    >>> full.method, max(full.sent), local.method, max(local.sent)
    ('heads', 6291456, 'ring', 262144)
    """
    queries, keys = (
        Layout.even(n, ranks, layout) if isinstance(n, int) else Layout.of(list(n), layout)
        for n in (Q, Q if K is None else K)
    )
    sizes = Sizes(B, H, H if G is None else G, D, D if E is None else E, dtype.itemsize, backward, backward)
    call_plan = plan(attend.mask, full_frame(attend, B, H, queries.length, keys.length), queries, keys)
    chosen = call_plan.choose(method, sizes)
    return BytesMoved(chosen, tuple(call_plan.ring_bytes(sizes) if chosen == "ring" else call_plan.head_bytes(sizes)))
