"""`python -m regard` as `python -m regard_cli`, which answers help and usage errors without importing torch.

Python imports the package `regard`, and so torch, before it runs `regard/__main__.py`. This module is therefore the
first import of the package. It restarts Python with the other module, in the same process.
"""

import os
import sys


def command_line(argv: list[str], original: list[str]) -> list[str] | None:
    """Return the command line to restart with, or None if Python is not about to run `python -m regard`.

    While Python looks for the module of `-m`, `sys.argv[0]` is "-m".

    >>> command_line(["-m", "--help"], ["python", "-m", "regard", "--help"])
    ['-m', 'regard_cli', '--help']
    >>> command_line(["train.py", "-m", "regard"], ["python", "train.py", "-m", "regard"])
    """
    if argv[:1] != ["-m"] or "-m" not in original:
        return None
    at = original.index("-m") + 1
    return [*original[1:at], "regard_cli", *original[at + 1 :]] if original[at] == "regard" else None


if os.name == "posix" and (arguments := command_line(sys.argv, sys.orig_argv)) is not None:
    os.execv(sys.executable, [sys.executable, *arguments])
