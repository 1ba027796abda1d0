"""`regard info`: what a bug report needs."""

from __future__ import annotations

from regard.cli.console import print_json, print_line
from regard.cli.options import Json


def info(as_json: Json = False) -> None:
    """Versions, engines, instruction set and threads: what a bug report needs.

    regard info
    """
    from regard.info import info as about

    found = about()
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        print_line(f"{name:16} {value}")
