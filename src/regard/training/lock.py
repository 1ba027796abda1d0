"""A lock on a run directory: one process writes to it at a time."""

from __future__ import annotations

import errno
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from regard.errors import RunLocked, UserError

NAME = "run.lock"
BUSY = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory, or raise `RunLocked`. The system releases it when the process ends, however it
    ends.

    The file stays; what counts is the lock on it.
    """
    with _take(folder / NAME) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _take(path: Path) -> TextIO:
    while True:
        file = _open(path)
        try:
            _lock(file)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except OSError as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            if error.errno not in BUSY:
                raise UserError(
                    f"{path}: cannot be locked ({error.strerror}); choose a folder on another disk"
                ) from error
            raise RunLocked(
                f"{path.parent}: is in use by {holder}; wait until it ends, or stop it, before you start or resume here"
            ) from error
        file.close()  # its name was deleted meanwhile: another process may lock a new file of that name


def _open(path: Path) -> TextIO:
    """The file of a lock, created if need be; a link or a special file is refused, as its target would be changed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise UserError(f"{path}: is no regular file; delete it") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: is no regular file; delete it")
    return os.fdopen(handle, "a+", encoding="utf-8", errors="replace")


def _lock(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # a lock there keeps others from reading: behind the text
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
