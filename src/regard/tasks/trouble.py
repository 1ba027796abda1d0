"""What the user can mend: told in one line, with the place and what to do."""

from __future__ import annotations

LONGEST = 2000  # characters of a message; it may quote what a file holds


class Trouble(ValueError):
    """A mistake in data, options or a run folder. The command prints it without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]}...")


def first_line(error: BaseException) -> str:
    """What an error says, in one line; some say nothing but their name."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


class Bad:
    """Lines that cannot be used: each raises `Trouble`, or is counted and left out where `skip` says so.

    >>> from regard.tasks.trouble import Bad
    >>> bad = Bad(skip=True)
    >>> bad("pairs.tsv:3: expected 2 columns, but 1 came")
    >>> bad.count, bad.first
    (1, ['pairs.tsv:3: expected 2 columns, but 1 came'])
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip, self.count, self.first = skip, 0, list[str]()

    def __call__(self, message: str) -> None:
        if not self.skip:
            raise Trouble(f"{message}; mend it, or leave such lines out with --skip-bad")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)
