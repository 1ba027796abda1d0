"""What the installed command calls: run the command line and print errors in one line."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.markup import escape

from regard_cli.commands import app
from regard_cli.paths import MissingPath


def main() -> None:
    """Run the command; print errors that the user can fix in one line, without a traceback."""
    for word in sys.argv[1:]:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python keeps bytes that are not UTF-8
            given = os.fsencode(word).decode("utf-8", "backslashreplace")
            _print_error(f"expected UTF-8 on the command line, got {given}; convert the text, or rename the file")
            sys.exit(2)
    try:
        app(prog_name="regard")
    except MissingPath as error:
        _print_error(str(error))
        sys.exit(1)
    except Exception as error:
        from regard.cli.console import print_user_error

        if not print_user_error(error):
            raise
        sys.exit(1)


def _print_error(message: str) -> None:
    """Print an error like `regard.cli.console.print_error`, which needs torch."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)
    Console(stderr=True, highlight=False).print(f"[bold red]regard:[/] {escape(text)}", soft_wrap=True)
