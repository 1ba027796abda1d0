"""Errors that the user can fix: one line each, with the place and what to do."""

from __future__ import annotations

LONGEST = 2000  # characters of a message; it may quote what a file holds


class UserError(ValueError):
    """A mistake in data, options or a run folder. The command prints it without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]}...")


class RunLocked(UserError):
    """Another process holds the lock of a run directory."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; some say nothing but their name."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class BadRows:
    """Lines that cannot be used: each raises `UserError`, or is counted and left out where `skip` says so.

    >>> from regard.errors import BadRows
    >>> bad = BadRows(skip=True)
    >>> bad.add("pairs.tsv:3: expected 2 columns, but 1 came")
    >>> bad.count, bad.first
    (1, ['pairs.tsv:3: expected 2 columns, but 1 came'])
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip, self.count, self.first = skip, 0, list[str]()

    def add(self, message: str) -> None:
        if not self.skip:
            raise UserError(f"{message}; fix it, or skip such lines with --skip-bad")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)
