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
    if not folder.exists() and not _is_included(str(folder)):
        raise MissingPath(f"{folder}: no such run; create one with regard train TASK --out {folder}")
    return folder


def check_model(name: str) -> str:
    """Raise unless the model exists, is included in the package, or has a name that may be on the Hub."""
    if not Path(name).exists() and not _is_included(name) and not may_be_on_hub(name):
        raise MissingPath(
            f"{name}: no such run or checkpoint; pass a folder, a GGUF file, a name on the Hub such as org/name, or "
            "en-fr"
        )
    return name


def may_be_on_hub(name: str) -> bool:
    """Whether a name that is no path of this machine may be that of a repository, org/name."""
    path = Path(name)
    is_local = name.startswith((".", "/", "~")) or path.parent.exists() or path.suffix == ".gguf"
    return name.count("/") == 1 and not is_local


def _is_included(name: str) -> bool:
    """Whether a run of this name is included in the package."""
    return Path(name).name == name and (source_file("regard").parent / "data" / "embedded" / name).is_dir()


def check_data(sources: Iterable[str]) -> None:
    """Raise for a file that does not exist; other names may be datasets of the hub."""
    for source in sources:
        if source.lower().endswith(FORMATS) and not Path(source).exists():
            raise MissingPath(f"{source}: no such file; pass a file, or the name of a dataset of the Hugging Face hub")
