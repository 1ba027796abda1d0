"""Checks of paths on the command line. They do not import torch, so that a mistyped path is reported at once.

Commands check their paths again when they use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from regard_cli.declared_tasks import source_file

FORMATS = (".tsv", ".csv", ".jsonl", ".txt", ".text", ".raw", ".md")  # as in regard.data.readers


class MissingPath(Exception):
    """A path on the command line that does not exist."""


def check_run(folder: Path) -> Path:
    """Raise unless the run exists, or a run of this name is included in the package."""
    included = source_file("regard").parent / "data" / "embedded" / folder.name
    if not folder.exists() and not (folder.name == str(folder) and included.is_dir()):
        raise MissingPath(f"{folder}: no such run; create one with regard train TASK --out {folder}")
    return folder


def check_data(sources: Iterable[str]) -> None:
    """Raise for a file that does not exist; other names may be datasets of the hub."""
    for source in sources:
        if source.lower().endswith(FORMATS) and not Path(source).exists():
            raise MissingPath(f"{source}: no such file; pass a file, or the name of a dataset of the Hugging Face hub")
