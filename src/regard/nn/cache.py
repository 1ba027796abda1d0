"""What generation remembers of the tokens before: keys and values, appended without copying what is there."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from regard.fingerprint import fingerprint


class Cache:
    """Keys and values (B, G, K, D), growing: room doubles when it is full, so a token costs O(1) copying on average.

    >>> import torch
    >>> from regard.nn import Cache
    >>> cache = Cache()
    >>> for _ in range(3):
    ...     keys, values = cache.append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    >>> keys.shape
    torch.Size([1, 2, 12, 8])
    """

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self.length = 0  # tokens held
        self.dropped = 0  # tokens that were held before and are not any more
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def seen_tokens(self) -> int:
        """How many tokens came so far."""
        return self.length + self.dropped

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Remember keys and values (B, G, n, D) of n tokens; all that their queries may see comes back, as views."""
        self._check(key, value)
        start, stop = self.length, self.length + key.shape[2]
        if self._keys is None or self._values is None or stop > self._keys.shape[2]:
            self._reserve(key, value, stop)
        assert self._keys is not None
        assert self._values is not None
        self._keys[:, :, start:stop] = key
        self._values[:, :, start:stop] = value
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Batch row b continues what row `rows[b]` was; they agree on the tokens before `start`, which stay."""
        if self._keys is None or self._values is None:
            return
        start = max(start - self.dropped, 0)
        changed = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        if len(rows) != len(self._keys):
            self._keys, self._values = self._keys[rows], self._values[rows]
        elif len(changed) and start < self.length:
            for held in (self._keys, self._values):
                part = held[:, :, start : self.length]
                part[changed] = part[rows[changed]]

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless the tokens fit those that are held: an assignment would broadcast or convert them."""
        for name, new, held in (("key", key, self._keys), ("value", value, self._values)):
            if held is None:
                continue
            expected, came = (
                (x.shape[0], x.shape[1], x.shape[3], x.dtype, str(x.device)) for x in (held, new)
            )  # fmt: skip
            if expected != came:
                raise ValueError(
                    f"{name} must be (B, G, n, D) with B, G, D, dtype and device of the tokens that the cache holds, "
                    f"{expected}, but they are {came}; begin another batch with an empty cache"
                )
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key and value must be (B, G, n, D) and (B, G, n, E) of the same tokens, but are {tuple(key.shape)} "
                f"and {tuple(value.shape)}"
            )

    def _reserve(self, key: Tensor, value: Tensor, needed: int) -> None:
        room = max(self.capacity, needed)
        if self._keys is not None:
            room = max(room, 2 * self._keys.shape[2])
        self._keys, self._values = self._reallocate(self._keys, key, room), self._reallocate(self._values, value, room)

    def _reallocate(self, held: Tensor | None, like: Tensor, room: int) -> Tensor:
        made = like.new_empty(*like.shape[:2], room, like.shape[3])
        if held is not None:
            made[:, :, : self.length] = held[:, :, : self.length]
        return made


class FixedCache(Cache):
    """A cache for at most `capacity` tokens: its memory is taken once, and never moves.

    >>> import torch
    >>> from regard.nn import FixedCache
    >>> FixedCache(8).append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))[0].shape
    torch.Size([1, 2, 4, 8])
    """

    def _reserve(self, key: Tensor, value: Tensor, needed: int) -> None:
        if needed > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens, but {needed} are needed; "
                "make it larger, or take a Cache, which grows"
            )
        super()._reserve(key, value, needed)


class WindowCache(Cache):
    """A cache for attention that looks back `window` tokens at most: it holds no more than it needs.

    Tokens stay in order, so masks and biases that tell positions hold: when the room of two windows is used up, the
    last window moves to its front, which again is O(1) copying a token on average.

    >>> import torch
    >>> from regard.nn import WindowCache
    >>> cache = WindowCache(4)
    >>> for _ in range(9):
    ...     keys, values = cache.append(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    >>> keys.shape, cache.seen_tokens
    (torch.Size([1, 2, 4, 8]), 9)
    """

    def __init__(self, window: int) -> None:
        super().__init__(2 * window)
        self.window = window
        self._first = 0  # where the held tokens begin

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._check(key, value)
        count = key.shape[2]
        keep = min(self.length, self.window - 1)  # what the first of the new queries may see of the old
        self._drop_first(self.length - keep)
        stop = self._first + keep + count
        if self._keys is None or self._values is None or stop > self._keys.shape[2]:
            room = max(self.capacity, keep + count)
            self._keys, self._values = self._to_front(self._keys, key, room), self._to_front(self._values, value, room)
            self._first, stop = 0, keep + count
        self._keys[:, :, stop - count : stop] = key
        self._values[:, :, stop - count : stop] = value
        self.length += count
        return self._keys[:, :, self._first : stop], self._values[:, :, self._first : stop]

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        if self._keys is None or self._values is None:
            return
        held = slice(self._first, self._first + self.length)
        if len(rows) != len(self._keys):
            self._keys, self._values = self._keys[rows], self._values[rows]
            return
        for tensor in (self._keys, self._values):
            tensor[:, :, held] = tensor[rows, :, held]

    def _drop_first(self, count: int) -> None:
        self._first += count
        self.length -= count
        self.dropped += count

    def _to_front(self, held: Tensor | None, like: Tensor, room: int) -> Tensor:
        made = held
        if held is None or held.shape[2] != room or self._first < self.length:
            made = like.new_empty(*like.shape[:2], room, like.shape[3])
        assert made is not None
        if held is not None:
            made[:, :, : self.length] = held[:, :, self._first : self._first + self.length]
        return made


class CrossCache:
    """Keys and values of a source, as cross-attention reads them: computed once, shared by all beams of a source.

    `seen_tokens` is how many query tokens came so far, so that those of the next call follow them. Of the source it
    holds a
    fingerprint: a source that is given again must have the same content, also where it is the same tensor.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None
        self.seen_tokens = 0
        self._rows = 0  # of the last call: the beams of a source are neighbours
        self._source: Hashable = None

    def store(self, source: Tensor, key: Tensor, value: Tensor) -> None:
        """Hold keys and values (B, G, K, D) of a source."""
        self.keys_values, self._source = (key, value), fingerprint(source)

    def check_source(self, source: Tensor | None) -> None:
        """Raise if a source is given whose content is not that whose keys and values are held."""
        if source is None:
            return
        if self._source is None:
            raise ValueError(
                f"the CrossCache cannot tell whether its source, a {type(source).__name__}, has changed; give the "
                "source "
                "at the first call only, and None after it"
            )
        if fingerprint(source) != self._source:
            raise ValueError(
                "the CrossCache holds keys and values of another source than the one given, or the source was written "
                "to "
                "since; begin with an empty CrossCache"
            )

    def beams(self, rows: int, count: int) -> int:
        """How many of the rows (of `count` query tokens each) of a call belong to each source."""
        assert self.keys_values is not None
        sources = len(self.keys_values[0])
        if not sources or rows % sources:
            raise ValueError(
                f"the rows of x must be a multiple of the {sources} sources that the CrossCache holds, but they are "
                f"{rows}"
            )
        self.seen_tokens, self._rows = self.seen_tokens + count, rows
        return rows // sources

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Batch row b continues what row `rows[b]` was: a row of the same source, since keys and masks stay."""
        if self.keys_values is None or not self._rows:
            return
        sources = len(self.keys_values[0])
        beams, before = len(rows) // sources, self._rows // sources
        own = torch.arange(len(rows), device=rows.device) // max(beams, 1)
        if len(rows) % sources or not torch.equal(rows // before, own):
            raise ValueError(
                f"a row must continue a row of its own source: the CrossCache holds {sources} sources of {before} rows "
                f"each, but rows are {rows.tolist()}"
            )
        self._rows = len(rows)
