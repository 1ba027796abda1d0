"""A lock on a run directory, so that only one process writes to it."""

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
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory, or raise `RunLocked`.

    The operating system releases the lock when the process ends, even if it crashes. The file stays.
    """
    with _acquire(folder / NAME) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _acquire(path: Path) -> TextIO:
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
                    f"{path}: cannot be locked ({error.strerror}); choose a directory on another disk"
                ) from error
            raise RunLocked(
                f"{path.parent}: is in use by {holder}; wait for it to end, or stop it, before you start or resume here"
            ) from error
        file.close()  # the file was deleted meanwhile; another process may lock a new one of that name


def _open(path: Path) -> TextIO:
    """Open or create the lock file; refuse links and special files, whose target would be modified."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise UserError(f"{path}: is not a regular file; delete it") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: is not a regular file; delete it")
    return os.fdopen(handle, "a+", encoding="utf-8", errors="replace")


def _lock(file: TextIO) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(1 << 30)  # locked bytes cannot be read by others, so lock one after the text
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
