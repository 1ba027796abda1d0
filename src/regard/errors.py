"""Errors that the user can fix: one line each, with the place and what to do."""

from __future__ import annotations

LONGEST = 2000  # longest message in characters; it may quote the content of a file


class UserError(ValueError):
    """An error in data, options or a run directory. The command prints it without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]}...")


class RunLocked(UserError):
    """Another process holds the lock of a run directory."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class BadRows:
    """Rows that cannot be read: each raises `UserError`, or with `skip` is counted and left out.

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
