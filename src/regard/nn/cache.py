"""Key/value caches for generation, appended to without copying the tokens already stored."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from regard.fingerprint import fingerprint


class Cache:
    """A growing cache of keys and values (B, G, K, D). Capacity doubles when full: amortised O(1) copying per token.

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
        self.length = 0  # tokens stored
        self.dropped = 0  # tokens evicted from the front
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def seen_tokens(self) -> int:
        """Number of tokens appended so far, including dropped ones."""
        return self.length + self.dropped

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, G, n, D); return views of all keys and values that the new queries attend to."""
        self._check(key, value)
        keys, values = self.extend(key, value)
        start, stop = self.length - key.shape[2], self.length
        keys[:, :, start:stop] = key
        values[:, :, start:stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for keys and values (B, G, n, D), and return buffers (B, G, capacity, D).

        The caller writes them to the last n of `length` tokens.
        """
        stop = self.length + key.shape[2]
        if self._keys is None or self._values is None or stop > self._keys.shape[2]:
            self._reserve(key, value, stop)
        assert self._keys is not None
        assert self._values is not None
        self.length = stop
        return self._keys, self._values

    def holds_like(self, key: Tensor, value: Tensor) -> bool:
        """Whether the cache is empty, or holds tokens like the given ones: B, G, D, dtype and device are the same."""
        return all(
            held is None
            or (held.shape[:2] == new.shape[:2] and held.shape[3] == new.shape[3] and held.dtype == new.dtype
                and held.device == new.device)
            for new, held in ((key, self._keys), (value, self._values))
        )  # fmt: skip

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Make batch row b continue row `rows[b]`. The two must agree on the tokens before `start`."""
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
        """Raise unless the new tokens match the stored ones; an assignment would silently broadcast or convert them."""
        for name, new, held in (("key", key, self._keys), ("value", value, self._values)):
            if held is None:
                continue
            expected, given = (
                (x.shape[0], x.shape[1], x.shape[3], x.dtype, str(x.device)) for x in (held, new)
            )  # fmt: skip
            if expected != given:
                raise ValueError(
                    f"{name} must be (B, G, n, D) with the B, G, D, dtype and device of the cached tokens, "
                    f"{expected}, got {given}; use an empty cache for another batch"
                )
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"key and value must be (B, G, n, D) and (B, G, n, E) with equal B, G and n, got {tuple(key.shape)} "
                f"and {tuple(value.shape)}"
            )

    def _reserve(self, key: Tensor, value: Tensor, needed: int) -> None:
        room = max(self.capacity, needed)
        if self._keys is not None:
            room = max(room, 2 * self._keys.shape[2])
        self._keys, self._values = self._reallocate(self._keys, key, room), self._reallocate(self._values, value, room)

    def _reallocate(self, held: Tensor | None, like: Tensor, room: int) -> Tensor:
        buffer = like.new_empty(*like.shape[:2], room, like.shape[3])
        if held is not None:
            buffer[:, :, : self.length] = held[:, :, : self.length]
        return buffer


class FixedCache(Cache):
    """A cache for at most `capacity` tokens, allocated once and never moved.

    >>> import torch
    >>> from regard.nn import FixedCache
    >>> FixedCache(8).append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))[0].shape
    torch.Size([1, 2, 4, 8])
    """

    def _reserve(self, key: Tensor, value: Tensor, needed: int) -> None:
        if needed > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} tokens, but {needed} are needed; "
                "increase its capacity, or use a Cache, which grows"
            )
        super()._reserve(key, value, needed)


class WindowCache(Cache):
    """A cache of the last `window` tokens, for attention with a sliding window.

    Tokens stay in order, so that masks and biases that depend on positions remain valid: the cache has room for two
    windows, and when it is full the last window moves to the front, amortised O(1) copying per token.

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
        self._first = 0  # index of the first stored token

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._check(key, value)
        count = key.shape[2]
        keep = min(self.length, self.window - 1)  # old tokens within the window of the first new query
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
        buffer = held
        if held is None or held.shape[2] != room or self._first < self.length:
            buffer = like.new_empty(*like.shape[:2], room, like.shape[3])
        assert buffer is not None
        if held is not None:
            buffer[:, :, : self.length] = held[:, :, self._first : self._first + self.length]
        return buffer


class CrossCache:
    """Keys and values of a source for cross-attention: computed once, shared by all beams of the source.

    seen_tokens: number of query tokens so far; those of the next call follow them.

    A fingerprint of the source is kept. A source that is passed again must have the same content, even if it is the
    same tensor object.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None
        self.seen_tokens = 0
        self._rows = 0  # batch rows of the last call; the beams of a source are adjacent rows
        self._source: Hashable = None

    def store(self, source: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values (B, G, K, D) of a source."""
        self.keys_values, self._source = (key, value), fingerprint(source)

    def check_source(self, source: Tensor | None) -> None:
        """Raise if `source` is given and its content differs from that of the cached source."""
        if source is None:
            return
        if self._source is None:
            raise ValueError(
                f"the CrossCache cannot check whether its source, a {type(source).__name__}, has changed; pass the "
                "source in the first call only, and None after that"
            )
        if fingerprint(source) != self._source:
            raise ValueError(
                "the CrossCache holds keys and values of a different source, or the source was modified in place; "
                "use an empty CrossCache for a new source"
            )

    def beams(self, rows: int, count: int) -> int:
        """Register a call of `rows` rows with `count` query tokens each; return the number of rows per source."""
        assert self.keys_values is not None
        sources = len(self.keys_values[0])
        if not sources or rows % sources:
            raise ValueError(
                f"the rows of x must be a multiple of the {sources} sources in the CrossCache, got {rows} rows"
            )
        self.seen_tokens, self._rows = self.seen_tokens + count, rows
        return rows // sources

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Make batch row b continue row `rows[b]`, which must have the same source: keys and masks do not move."""
        if self.keys_values is None or not self._rows:
            return
        sources = len(self.keys_values[0])
        beams, before = len(rows) // sources, self._rows // sources
        source_of_row = torch.arange(len(rows), device=rows.device) // max(beams, 1)
        if len(rows) % sources or not torch.equal(rows // before, source_of_row):
            raise ValueError(
                f"a row must continue a row of the same source: the CrossCache holds {sources} sources of {before} "
                f"rows each, got rows {rows.tolist()}"
            )
        self._rows = len(rows)
