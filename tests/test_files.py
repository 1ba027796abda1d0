"""Atomic writes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from regard.files import remove_partial_files, write_atomically, write_text_atomically


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = write_text_atomically(tmp_path / "a.txt", "old\r\n")

    def half(temporary: Path) -> None:
        temporary.write_bytes(b"ne")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_atomically(path, half)
    assert path.read_bytes() == b"old\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    kept = [write_text_atomically(tmp_path / name, "x") for name in (".hidden", "a.part")]
    names: list[Path] = []

    def watched(temporary: Path) -> None:
        names.append(temporary)
        temporary.write_text("y")

    kept.append(write_atomically(tmp_path / "b", watched))
    names[0].write_text("half")
    (tmp_path / ".folder.part").mkdir()
    remove_partial_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.skipif(os.name != "posix", reason="rights are those of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_default_mode(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = write_atomically(
            tmp_path / "a", lambda temporary: os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
        )
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
