"""Docstrings as Markdown for the site: examples become code, and lines such as `mask: who may look` become a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

NAMED = re.compile(r"[a-z_][a-z_0-9]*(, [a-z_][a-z_0-9]*)*: \S")


class Plain(Extension):
    """What `mkdocs.yml` names: griffe calls it with every object that it reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """A docstring with its examples in fences and its named parts as items of a list."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            inside = True
            lines += ["", "```pycon"]
        elif inside and not line.strip():
            inside = False
            lines.append("```")
        if inside:
            lines.append(line)
        elif NAMED.match(line):
            names, words = line.split(": ", 1)
            if lines and lines[-1] and not lines[-1].startswith(("- ", " ")):
                lines.append("")
            lines.append(f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {words}")
        else:
            lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines).replace("\n\n\n", "\n\n")
