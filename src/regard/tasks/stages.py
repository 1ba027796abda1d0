"""What a long call is doing: `stage` names it, and `track` counts. Only the command reports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Reporter(Protocol):
    """Shows the stages of a call, of which the last that began is the innermost."""

    def begin(self, label: str) -> None: ...
    def count(self, done: int, total: int | None) -> None: ...
    def end(self) -> None: ...


_REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


@contextmanager
def reporting(reporter: Reporter) -> Iterator[None]:
    """Within, stages are reported."""
    token = _REPORTER.set(reporter)
    try:
        yield
    finally:
        _REPORTER.reset(token)


@contextmanager
def stage(label: str) -> Iterator[None]:
    """Within, what is computed goes by this label: "reading data"."""
    reporter = _REPORTER.get()
    if reporter is None:
        yield
        return
    reporter.begin(label)
    try:
        yield
    finally:
        reporter.end()


def track(items: Iterable[T]) -> Iterator[T]:
    """The items, of which the innermost stage counts those that are done.

    >>> from regard.tasks.stages import track
    >>> list(track("abc"))
    ['a', 'b', 'c']
    """
    reporter = _REPORTER.get()
    if reporter is None:
        yield from items
        return
    total = len(items) if isinstance(items, Sized) else None
    for done, item in enumerate(items, 1):
        yield item
        reporter.count(done, total)
