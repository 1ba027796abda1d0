"""Console output: results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.errors import BadRows, UserError
from regard.printable import printable, printable_json
from regard.training.runs import is_disk_full

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


class PipeSafeConsole(Console):
    """A console that goes quiet when its pipe closes, as with `| head`, so that files are still written."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quote_markup(text: object) -> str:
    """Escape text of unknown origin for rich markup."""
    return escape(printable(text))


def print_line(text: object) -> None:
    """Print one line of results on standard output."""
    print(printable(text, keep="\t"))


def print_piece(text: str) -> None:
    """Print a piece of an output at once, with its line ends."""
    print(printable(text, keep="\n\t"), end="", flush=True)


def print_json(value: Any, indent: int | None = 1) -> None:
    """Print JSON on standard output."""
    print(printable_json(value, indent=indent))


def print_message(line: str) -> None:
    """Print a line on standard error that can be copied: not wrapped, and without markup."""
    stderr.print(printable(line), soft_wrap=True, markup=False)


def print_error(error: Exception) -> None:
    """Print an error in one line on standard error."""
    has_filename = isinstance(error, OSError) and error.filename is not None
    message = f"{error.filename}: {error.strerror}" if has_filename else str(error)  # type: ignore[attr-defined]
    stderr.print(f"[bold red]regard:[/] {quote_markup(message)}", soft_wrap=True)


def print_user_error(error: Exception) -> bool:
    """Print an error in one line if the user can fix it; return whether it is such an error."""
    has_filename = isinstance(error, OSError) and error.filename is not None
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch raises a RuntimeError
        error = UserError("there is not enough memory; give smaller inputs, or use a machine that has more")
    elif not (isinstance(error, UserError) or has_filename or is_disk_full(error)):
        return False
    print_error(error)
    return True


def print_bad_rows(bad: BadRows) -> None:
    """Print how many lines were skipped, and the first of them."""
    if bad.count:
        stderr.print(
            f"[yellow]{bad.count} bad lines left out[/], the first: {quote_markup(bad.first[0])}", soft_wrap=True
        )
