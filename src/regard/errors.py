"""Errors that the user can fix. Each message is one line with the place of the error and a remedy."""

from __future__ import annotations

MAX_MESSAGE = 2000  # characters; messages may quote file contents


class UserError(ValueError):
    """A mistake in data, options or a run directory. The command line prints it without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")


class RunLocked(UserError):
    """Another process holds the lock of a run directory."""


def first_line(error: BaseException) -> str:
    """First line of the message of an error, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class BadRows:
    """Rows that cannot be used. Each raises `UserError`, or with `skip=True` is counted and left out.

    >>> from regard.errors import BadRows
    >>> bad = BadRows(skip=True)
    >>> bad.add("pairs.tsv:3: expected 2 columns, got 1")
    >>> bad.count, bad.first
    (1, ['pairs.tsv:3: expected 2 columns, got 1'])
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip, self.count, self.first = skip, 0, list[str]()

    def add(self, message: str) -> None:
        if not self.skip:
            raise UserError(f"{message}; fix it, or skip such lines with --skip-bad")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)
