"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from regard.files import whole, whole_text


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = whole_text(tmp_path / "a.txt", "old\r\n")

    def half(beside: Path) -> None:
        beside.write_bytes(b"ne")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        whole(path, half)
    assert path.read_bytes() == b"old\r\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="rights are those of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_rights_of_any_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = whole(tmp_path / "a", lambda beside: os.close(os.open(beside, os.O_CREAT | os.O_WRONLY, 0o600)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
