"""Progress of long calls: `stage` names a step, `track` counts items. Only the command line prints progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

T = TypeVar("T")


class Reporter(Protocol):
    """Receives the progress of nested stages; `count` and `end` refer to the innermost one."""

    def start(self, label: str) -> None: ...
    def count(self, done: int, total: int | None) -> None: ...
    def end(self) -> None: ...


_REPORTER: ContextVar[Reporter | None] = ContextVar("reporter", default=None)


@contextmanager
def report_to(reporter: Reporter) -> Iterator[None]:
    """Report stages to `reporter` within this context."""
    token = _REPORTER.set(reporter)
    try:
        yield
    finally:
        _REPORTER.reset(token)


@contextmanager
def stage(label: str) -> Iterator[None]:
    """Label the work done within this context, for example "reading data"."""
    reporter = _REPORTER.get()
    if reporter is None:
        yield
        return
    reporter.start(label)
    try:
        yield
    finally:
        reporter.end()


def track(items: Iterable[T]) -> Iterator[T]:
    """Iterate over items and count those done in the innermost stage.

    >>> from regard.progress import track
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
