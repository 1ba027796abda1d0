"""Key/value caches for generation, appended to without copying the tokens already stored."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from regard.fingerprint import fingerprint
from regard.quantized import QuantizedTensor, check_stored_dtype

Stored = tuple[Tensor, Tensor] | tuple[QuantizedTensor, QuantizedTensor]  # keys and values


class Cache:
    """A growing cache of keys and values (B, G, K, D). Capacity doubles when full: amortised O(1) copying per token.

    dtype: `torch.bfloat16`, `torch.float16` or `torch.int8` (with a scale per token and head) store tokens in fewer
        bytes: `append` then returns `QuantizedTensor`s, which attention reads in place. By default tokens are stored as
        they are.

    >>> import torch
    >>> from regard.nn import Cache
    >>> cache = Cache()
    >>> for _ in range(3):
    ...     keys, values = cache.append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))
    >>> keys.shape
    torch.Size([1, 2, 12, 8])
    >>> Cache(dtype=torch.int8).append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))[0]
    QuantizedTensor((1, 2, 4, 8), int8, for float32)
    """

    def __init__(self, capacity: int = 64, *, dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            check_stored_dtype(dtype)
        self.capacity = capacity
        self.dtype = dtype
        self.length = 0  # tokens stored
        self.dropped = 0  # tokens evicted from the front
        self._held: list[Tensor] = []  # keys and values; of int8 also their scales (B, G, K)
        self._given = torch.float32  # dtype of the appended tokens

    @property
    def seen_tokens(self) -> int:
        """Number of tokens appended so far, including dropped ones."""
        return self.length + self.dropped

    def append(self, key: Tensor, value: Tensor) -> Stored:
        """Append keys and values (B, G, n, D); return views of all keys and values that the new queries attend to."""
        self._check(key, value)
        new = self._to_stored(key, value)
        self._make_room(new)
        self._write(new, self.length - key.shape[2])
        return self._view(0, self.length)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for keys and values (B, G, n, D), and return buffers (B, G, capacity, D).

        The caller writes them to the last n of `length` tokens, as they are: see `holds_like`.
        """
        self._given = key.dtype
        self._make_room([key, value])
        return self._held[0], self._held[1]

    def holds_like(self, key: Tensor, value: Tensor) -> bool:
        """Whether tokens like these are stored as they are, with the B, G, D and device of those in the cache."""
        return self.dtype in (None, key.dtype) and all(
            held.shape[:2] == new.shape[:2] and held.shape[3] == new.shape[3] and held.dtype == new.dtype
            and held.device == new.device
            for new, held in zip((key, value), self._held, strict=False)
        )  # fmt: skip

    def _make_room(self, new: list[Tensor]) -> None:
        stop = self.length + new[0].shape[2]
        if not self._held or stop > self._room:
            self._reserve(new, stop)
        self.length = stop

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Make batch row b continue row `rows[b]`. The two must agree on the tokens before `start`."""
        if not self._held:
            return
        start = max(start - self.dropped, 0)
        changed = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        if len(rows) != len(self._held[0]):
            self._held = [held[rows] for held in self._held]
        elif len(changed) and start < self.length:
            for held in self._held:
                part = held[:, :, start : self.length]
                part[changed] = part[rows[changed]]

    @property
    def _room(self) -> int:
        return self._held[0].shape[2]

    def _to_stored(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return new tokens in the form of `_held`."""
        if self.dtype is None or self.dtype == key.dtype:
            return [key, value]
        parts = [QuantizedTensor.quantize(x, self.dtype) for x in (key, value)]
        return [part.data for part in parts] + [part.scale for part in parts if part.scale is not None]

    def _write(self, new: list[Tensor], start: int) -> None:
        for held, tokens in zip(self._held, new, strict=True):
            held[:, :, start : start + tokens.shape[2]] = tokens

    def _view(self, start: int, stop: int) -> Stored:
        parts = [held[:, :, start:stop] for held in self._held]
        if self.dtype is None or self.dtype == self._given:
            return parts[0], parts[1]
        scales = parts[2:] or (None, None)
        keys, values = (QuantizedTensor(parts[n], scales[n], self._given) for n in range(2))
        return keys, values

    def _check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless the new tokens match the stored ones; an assignment would silently broadcast or convert them."""
        if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype:
            raise ValueError(
                "key and value must be (B, G, n, D) and (B, G, n, E) with equal B, G, n and dtype, got "
                f"{tuple(key.shape)} of {key.dtype} and {tuple(value.shape)} of {value.dtype}"
            )
        if not self._held:
            self._given = key.dtype
        for name, new, held in zip(("key", "value"), (key, value), self._held, strict=False):
            expected, given = (
                (x.shape[0], x.shape[1], x.shape[3], dtype, str(x.device))
                for x, dtype in ((held, self._given), (new, new.dtype))
            )
            if expected != given:
                raise ValueError(
                    f"{name} must be (B, G, n, D) with the B, G, D, dtype and device of the cached tokens, "
                    f"{expected}, got {given}; use an empty cache for another batch"
                )

    def _reserve(self, new: list[Tensor], needed: int) -> None:
        room = max(self.capacity, needed)
        if self._held:
            room = max(room, 2 * self._room)
        self._reallocate(new, room)

    def _reallocate(self, like: list[Tensor], room: int, first: int = 0) -> None:
        """Move the stored tokens, which begin at `first`, to the front of new buffers."""
        buffers = [tensor.new_empty(*tensor.shape[:2], room, *tensor.shape[3:]) for tensor in like]
        for buffer, held in zip(buffers, self._held, strict=False):
            buffer[:, :, : self.length] = held[:, :, first : first + self.length]
        self._held = buffers


class FixedCache(Cache):
    """A cache for at most `capacity` tokens, allocated once and never moved.

    >>> import torch
    >>> from regard.nn import FixedCache
    >>> FixedCache(8).append(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))[0].shape
    torch.Size([1, 2, 4, 8])
    """

    def _reserve(self, new: list[Tensor], needed: int) -> None:
        if needed > self.capacity:
            raise ValueError(
                f"the cache has a capacity of {self.capacity} tokens, but {needed} are needed; "
                "increase its capacity, or use a Cache, which grows"
            )
        super()._reserve(new, needed)


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

    def __init__(self, window: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(2 * window, dtype=dtype)
        self.window = window
        self._first = 0  # index of the first stored token

    def append(self, key: Tensor, value: Tensor) -> Stored:
        self._check(key, value)
        new, count = self._to_stored(key, value), key.shape[2]
        keep = min(self.length, self.window - 1)  # old tokens within the window of the first new query
        self._drop_first(self.length - keep)
        stop = self._first + keep + count
        if not self._held or stop > self._room:
            self._to_front(new, max(self.capacity, keep + count))
            stop = keep + count
        self._write(new, stop - count)
        self.length += count
        return self._view(self._first, stop)

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        if not self._held:
            return
        kept = slice(self._first, self._first + self.length)
        if len(rows) != len(self._held[0]):
            self._held = [held[rows] for held in self._held]
            return
        for held in self._held:
            held[:, :, kept] = held[rows, :, kept]

    def _drop_first(self, count: int) -> None:
        self._first += count
        self.length -= count
        self.dropped += count

    def _to_front(self, new: list[Tensor], room: int) -> None:
        """Move the stored tokens to the front; in place if they do not overlap it."""
        if not self._held or self._room != room or self._first < self.length:
            self._reallocate(new, room, self._first)
        else:
            for held in self._held:
                held[:, :, : self.length] = held[:, :, self._first : self._first + self.length]
        self._first = 0


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
