"""Where the command speaks: results on standard output, all else on standard error."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.printable import printable, printable_json
from regard.tasks.trouble import Bad

told = Console(stderr=True, highlight=False)
shown = Console(highlight=False)


class Patient(Console):
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


def tell(line: str) -> None:
    """A line as it is, to be copied: not wrapped, and brackets in a path are no markup."""
    told.print(printable(line), soft_wrap=True, markup=False)


def tell_trouble(error: Exception) -> None:
    """A mistake that the user can mend, in one line."""
    of_a_file = isinstance(error, OSError) and error.filename is not None
    words = f"{error.filename}: {error.strerror}" if of_a_file else str(error)  # type: ignore[attr-defined]
    told.print(f"[bold red]regard:[/] {quoted(words)}", soft_wrap=True)


def tell_bad(bad: Bad) -> None:
    """How many lines could not be used, and the first of them."""
    if bad.count:
        told.print(f"[yellow]{bad.count} bad lines left out[/], the first: {quoted(bad.first[0])}", soft_wrap=True)
