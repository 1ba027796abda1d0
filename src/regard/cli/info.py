"""`regard info`: print the facts that a bug report needs."""

from __future__ import annotations

from regard.cli.console import print_json, print_line
from regard.info import info as collect_info


def info(as_json: bool) -> None:
    """Print versions, engines, instruction set and threads."""
    values = collect_info()
    if as_json:
        print_json(values)
        return
    for name, value in values.items():
        print_line(f"{name:16} {value}")
