"""Where the command speaks: results on standard output, all else on standard error."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.errors import BadRows
from regard.printable import printable, printable_json

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


class PipeSafeConsole(Console):
    """Goes on in silence when its reader has left, as with `| head`: what is being made is still wanted."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quoted(text: object) -> str:
    """Text of unknown origin within rich's markup."""
    return escape(printable(text))


def print_line(text: object) -> None:
    """One line of results on standard output."""
    print(printable(text, keep="\t"))


def print_json(value: Any, indent: int | None = 1) -> None:
    """JSON on standard output."""
    print(printable_json(value, indent=indent))


def print_message(line: str) -> None:
    """A line as it is, to be copied: not wrapped, and brackets in a path are no markup."""
    stderr.print(printable(line), soft_wrap=True, markup=False)


def print_error(error: Exception) -> None:
    """A mistake that the user can mend, in one line."""
    has_filename = isinstance(error, OSError) and error.filename is not None
    words = f"{error.filename}: {error.strerror}" if has_filename else str(error)  # type: ignore[attr-defined]
    stderr.print(f"[bold red]regard:[/] {quoted(words)}", soft_wrap=True)


def print_bad_rows(bad: BadRows) -> None:
    """How many lines could not be used, and the first of them."""
    if bad.count:
        stderr.print(f"[yellow]{bad.count} bad lines left out[/], the first: {quoted(bad.first[0])}", soft_wrap=True)
