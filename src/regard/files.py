"""Files that are read only if they are files, and written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 200_000_000  # bytes of a text that is read at once; the largest tokenizers have a fifth of that
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotAFile(OSError):
    """A path that names a FIFO, a socket, a device or a folder where a file is expected."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def require_file(path: str | os.PathLike[str]) -> Path:
    """The path, if it names a regular file: to open anything else may wait forever, or never end.

    >>> from regard.files import require_file
    >>> require_file("/dev/zero")
    Traceback (most recent call last):
    regard.files.NotAFile: /dev/zero: is a device, but a regular file is expected; copy what it holds into one
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no file")
        what = f"is {kind}, but a regular file is expected; copy what it holds into one"
        raise NotAFile(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, what, str(path))
    return Path(path)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether the path names a regular file; one that is no possible name does not."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """The UTF-8 of a regular file that is not absurdly large; anything else is an error that names it."""
    if (size := require_file(path).stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{path} must have at most {MAX_TEXT_BYTES} bytes, but has {size}; is it the right file?")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def read_json(path: Path) -> Any:
    """The value that a JSON file holds; what is no JSON, and a key that comes twice, is an error that names it."""
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {str(error)[:300]}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for `json.loads`; a key that comes twice is an error."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} comes twice")
        found[key] = value
    return found


def write_atomically(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write beside the path, let it reach the disk, and only then give it its name and the rights of any new file."""
    if path.is_dir():
        raise Unwritable(errno.EISDIR, "is a folder, but a file is to be written there; remove it", str(path))
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


def write_text_atomically(path: Path, text: str) -> Path:
    """The same for UTF-8, with line ends as they are."""
    return write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8", newline=""))


def remove_partial_files(folder: Path) -> None:
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


class Unwritable(OSError):
    """A file that cannot be written, and what to do."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def check_writable(path: Path, *, parents: bool = False) -> None:
    """Raise unless `whole` can write this file; to be called before long work whose result goes there.

    parents: folders that are not there will be made.
    """
    above = path.absolute().parents
    folder = next(each for each in above if each.exists()) if parents else above[0]
    if path.is_dir():
        raise Unwritable(errno.EISDIR, "is a folder; name a file", str(path))
    if path.exists() and not path.is_file():
        raise Unwritable(errno.EINVAL, "is no regular file; choose another name", str(path))
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
