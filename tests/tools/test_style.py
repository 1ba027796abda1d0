"""The check of words and names in `make lint`."""

from __future__ import annotations

import pytest
from tools.style import message_problems, problems


@pytest.mark.parametrize(
    "line",
    [
        "# who is told of it",
        "a peer beside ours",
        "x = 1  # Mended",
        "def made() -> int:",
        "class Seen:",
        "it stands here",
        "    found = 1",
        "for said, other in pairs:",
        "keys are laid out",
    ],
)
def test_words_and_names_that_are_ruled_out_are_reported(line: str) -> None:
    (problem,) = problems("a.py", f"\n{line}\n")
    assert problem.startswith("a.py:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "G stands for key/value heads",
        "besides",
        "def make_mask() -> int:",
        "amendment",
        "storytold = 1",
        "found_at = 1",
        "if found == 1:",
    ],
)
def test_ordinary_words_are_accepted(line: str) -> None:
    assert list(problems("a.py", line)) == []


def test_names_are_checked_in_python_only() -> None:
    assert list(problems("a.md", "class Seen:")) == []


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("Cache block masks by description\n\nWhy.", 0),
        ("Cached block masks", 1),
        ("cache block masks.", 1),
        ("Cache " + "block " * 12 + "masks", 1),
    ],
)
def test_subjects_of_commits(message: str, count: int) -> None:
    assert len(list(message_problems(message))) == count
