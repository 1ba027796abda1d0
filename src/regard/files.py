"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def whole(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write beside the path, let it reach the disk, and only then give it its name and the rights of any new file."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(beside)
        _sync(beside, os.O_RDWR)
        if os.name == "posix":
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _sync(path.parent, os.O_RDONLY)
    return path


def whole_text(path: Path, text: str) -> Path:
    """The same for UTF-8, with line ends as they are."""
    return whole(path, lambda beside: beside.write_text(text, encoding="utf-8", newline=""))


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
