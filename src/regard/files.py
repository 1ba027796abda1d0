"""Reading regular files only, and writing files atomically."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 200_000_000  # limit of a text that is read at once; the largest tokenizers take a fifth of it
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotAFile(OSError):
    """A path to a FIFO, socket, device or directory where a file is expected."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require_file(path: str | os.PathLike[str]) -> Path:
    """Return the path if it is a regular file; opening anything else may block or never end.

    >>> from regard.files import require_file
    >>> require_file("/dev/zero")
    Traceback (most recent call last):
    regard.files.NotAFile: /dev/zero: is a device, but a regular file is expected; copy its content into one
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        what = f"is {kind}, but a regular file is expected; copy its content into one"
        raise NotAFile(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, what, str(path))
    return Path(path)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a regular file; False for an invalid name."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """Return the UTF-8 content of a regular file of reasonable size; errors name the file."""
    if (size := require_file(path).stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path} must have at most {MAX_TEXT_BYTES} bytes, but has {size}; is it the right file?")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text: {error}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; invalid JSON and duplicate keys raise errors that name the file."""
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:300]}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from pairs, for `json.loads`; raise on duplicate keys."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key[:80]!r}")
        result[key] = value
    return result


def write_atomically(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write to a temporary file next to the path, sync it, then rename it and give it the mode of a new file."""
    if path.is_dir():
        raise Unwritable(errno.EISDIR, "is a folder, but a file is to be written there; remove it", str(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        write(temporary)
        sync(temporary)
        if os.name == "posix":
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return path


def write_text_atomically(path: Path, text: str) -> Path:
    """Write UTF-8 text atomically, with line ends unchanged."""
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))


def remove_partial_files(folder: Path) -> None:
    """Delete the temporary files of writers that were killed. No other process may be writing meanwhile."""
    for leftover in folder.glob(".*.part"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk; Windows does not support folders."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Unwritable(OSError):
    """A file that cannot be written, with advice."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_writable(path: Path, *, parents: bool = False, suffixes: Sequence[str] = ()) -> None:
    """Raise unless this file can be written; call it before long work whose result is written there.

    parents: missing folders will be created. suffixes: of the formats that can be written; empty if any name will do.
    """
    above = path.absolute().parents
    folder = next(each for each in above if each.exists()) if parents else above[0]
    if path.is_dir():
        raise Unwritable(errno.EISDIR, "is a folder; pass the name of a file", str(path))
    if path.exists() and not path.is_file():
        raise Unwritable(errno.EINVAL, "is not a regular file; choose another name", str(path))
    if suffixes and path.suffix.lower() not in suffixes:
        advice = f"is not written in this format; name the file {path.stem}{f' or {path.stem}'.join(suffixes)}"
        raise Unwritable(errno.EINVAL, advice, str(path))
    if not folder.is_dir():
        raise Unwritable(errno.ENOTDIR, f"there is no folder {folder}", str(path))
    probe = folder / f".{uuid.uuid4().hex}.part"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise Unwritable(
            error.errno, f"cannot be written ({error.strerror}); choose another place", str(path)
        ) from error
