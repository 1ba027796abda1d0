"""One cache, limited in bytes, for everything derived from descriptions: plans, tile tables, mask layouts.

The least recently used entry is evicted first. An entry may have an owner, and is dropped with it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

LIMIT = 256 * 2**20  # bytes, the default of set_cache_limit
OVERHEAD = 512  # rough size in bytes of the Python objects of an entry
SHARED_BYTES = 2**16  # an entry up to this size may outlive its owner, to serve equal masks later

T = TypeVar("T")


class CacheInfo(NamedTuple):
    """Contents and hit counts of the cache; see `cache_info`.

    >>> import regard as rg
    >>> rg.cache_info().limit // 2**20
    256
    """

    nbytes: int
    limit: int
    entries: int
    hits: int
    misses: int


class _Entry(NamedTuple):
    value: Any
    nbytes: int
    drop: Callable[[Any], None] | None  # called with the value when the entry is dropped
    owner: weakref.ref | None


class Cache:
    """A least-recently-used cache with a limit in bytes. Thread-safe.

    >>> cache = Cache(limit=10_000)
    >>> cache.get_or_build("zeros", lambda: np.zeros(100)).nbytes
    800
    >>> float(cache.get_or_build("zeros", lambda: np.ones(100)).max())
    0.0
    >>> cache.info().entries
    1
    """

    def __init__(self, limit: int) -> None:
        self.epoch = 0  # counts changes of the contents: within an epoch, an entry needs to be touched once only
        self._limit, self._nbytes, self._hits, self._misses = limit, 0, 0, 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = Lock()
        self._orphans: deque[tuple[Hashable, weakref.ref]] = deque()  # owners died while the lock was held

    def get_or_build(self, key: Hashable | None, build: Callable[[], T], owner: Any = None) -> T:
        """Return the value of a key, building it if missing. With `key=None` it is built every time and not kept.

        An entry of more than `SHARED_BYTES` is dropped with its owner, if that holds tensors.
        """
        if key is None:
            return build()
        with self._lock:
            if (known := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                return known.value
            self._misses += 1
        value = build()
        nbytes = size_of(value)
        self.put(key, value, nbytes, owner if nbytes > SHARED_BYTES and size_of(owner) else None)
        return value

    def put(
        self, key: Hashable, value: Any, nbytes: int, owner: Any = None, drop: Callable[[Any], None] | None = None
    ) -> None:
        """Keep a value while its owner lives and the limit allows; `drop(value)` is called when it is dropped."""
        reference = None if owner is None else weakref.ref(owner, lambda dead: self._on_death(key, dead))
        evicted = []
        with self._lock:
            evicted += [entry for entry in self._pop(key) if entry.value is not value]
            evicted += self._collect()
            self._entries[key] = _Entry(value, nbytes + OVERHEAD, drop, reference)
            self.epoch += 1
            self._nbytes += nbytes + OVERHEAD
            evicted += self._shrink()
        _drop(evicted)

    def find(self, key: Hashable) -> Any:
        """Return the value of a key and mark it as used; None if there is none."""
        with self._lock:
            if (known := self._entries.get(key)) is None:
                return None
            self._entries.move_to_end(key)
            self._hits += 1
            return known.value

    def touch(self, key: Hashable) -> None:
        """Mark an entry as used, for a value held elsewhere."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self._hits += 1

    def clear(self) -> None:
        with self._lock:
            evicted = list(self._entries.values())
            self.epoch += 1
            self._entries.clear()
            self._orphans.clear()
            self._nbytes = self._hits = self._misses = 0
        _drop(evicted)

    def set_limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            evicted = self._shrink()
        _drop(evicted)

    def info(self) -> CacheInfo:
        with self._lock:
            gone = self._collect()
            info = CacheInfo(self._nbytes, self._limit, len(self._entries), self._hits, self._misses)
        _drop(gone)
        return info

    def _on_death(self, key: Hashable, dead: weakref.ref) -> None:
        # An object may die while this thread holds the lock: then the next holder of the lock cleans up.
        self._orphans.append((key, dead))
        if self._lock.acquire(blocking=False):
            try:
                evicted = self._collect()
            finally:
                self._lock.release()
            _drop(evicted)

    def _collect(self) -> list[_Entry]:
        evicted = []
        while self._orphans:
            key, dead = self._orphans.popleft()
            if (entry := self._entries.get(key)) is not None and entry.owner is dead:
                evicted += self._pop(key)
        return evicted

    def _pop(self, key: Hashable) -> list[_Entry]:
        entry = self._entries.pop(key, None)
        if entry is None:
            return []
        self.epoch += 1
        self._nbytes -= entry.nbytes
        return [entry]

    def _shrink(self) -> list[_Entry]:
        evicted = []
        while self._nbytes > self._limit and self._entries:
            evicted += self._pop(next(iter(self._entries)))
        return evicted


def _drop(entries: list[_Entry]) -> None:
    """Drop entries outside the lock, since this may destroy other objects."""
    for entry in entries:
        if entry.drop is not None:
            entry.drop(entry.value)


def size_of(value: Any) -> int:
    """Return the bytes of all tensors and arrays in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() if value.device.type != "meta" else 0
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(size_of(getattr(value, field.name)) for field in fields(value))
    return 0


CACHE = Cache(LIMIT)


def set_cache_limit(nbytes: int) -> None:
    """Set the limit in bytes for plans, tile tables and mask layouts; 256 MB by default. 0 keeps nothing.

    >>> import regard as rg
    >>> rg.set_cache_limit(64 * 2**20)
    >>> rg.cache_info().limit == 64 * 2**20
    True
    >>> rg.set_cache_limit(256 * 2**20)
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(
            f"nbytes must be a whole number of bytes, at least 0, but is {nbytes!r}; for 256 MB pass 256 * 2**20"
        )
    CACHE.set_limit(nbytes)


def cache_info() -> CacheInfo:
    """Return the state of the cache of plans, tile tables and mask layouts: nbytes, limit, entries, hits, misses.

    >>> import regard as rg
    >>> info = rg.cache_info()
    >>> info.nbytes <= info.limit
    True
    """
    return CACHE.info()


def clear_cache() -> None:
    """Drop all plans, tile tables and mask layouts; they are rebuilt on demand.

    >>> import regard as rg
    >>> rg.clear_cache()
    >>> rg.cache_info().entries
    0
    """
    CACHE.clear()
