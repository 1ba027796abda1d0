"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write beside the path, let it reach the disk, and only then give it its name and the rights of any new file."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        write(beside)
        sync(beside)
        if os.name == "posix":
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return path


def whole_text(path: Path, text: str) -> Path:
    """The same for UTF-8, with line ends as they are."""
    return whole(path, lambda beside: beside.write_text(text, encoding="utf-8", newline=""))


def sweep(folder: Path) -> None:
    """Delete what writers that were killed left half written. Nobody may be writing there meanwhile."""
    for left in folder.glob(".*.part"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk; Windows has no such thing for folders."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
