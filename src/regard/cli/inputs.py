"""What a model is asked: texts, files of them, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from regard.tasks import Task
from regard.tasks.data import Row, decoded, text_of
from regard.tasks.trouble import Bad


def asked(task: Task, inputs: list[str], bad: Bad) -> Iterator[Row]:
    """What to predict: arguments, lines of files, or lines of standard input."""
    if task.takes != "text":
        yield from (Row(given, (given,)) for given in inputs)
        return
    if not inputs and not sys.stdin.isatty():
        yield from _lines("standard input", sys.stdin.buffer, bad)
    for n, given in enumerate(inputs, 1):
        path = Path(given)
        if len(given) < 256 and path.is_file():
            own = task.asked(path, bad)
            with path.open("rb") as file:
                yield from _lines(given, file, bad) if own is None else own
        else:
            yield Row(f"input {n}", (given,))


def with_context(row: Row, context: Path | None) -> Row:
    """An input, and behind a tab the text of the file that it is about, if there is one."""
    if context is None or len(row.values) > 1:
        return row
    return Row(row.place, (f"{row.values[0]}\t{text_of(context).strip()}",))


def _lines(name: str, file: BinaryIO, bad: Bad) -> Iterator[Row]:
    for n, line in enumerate(file, 1):
        if text := (decoded(name, n, line, bad) or "").strip():
            yield Row(f"{name}:{n}", (text,))
