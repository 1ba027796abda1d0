"""The check of a tree before its release."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tools.release import ROOT, find_problems

NEXT = "9.8.7"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the check reads, ready to be released as 9.8.7."""
    docs = ("docs/benchmarks.md", "docs/results.json", "docs/comparison.md")
    for name in (*docs, "README.md", "CHANGELOG.md", "src/regard/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    replace(tmp_path / "src/regard/__init__.py", '__version__ = "0.1.0"', f'__version__ = "{NEXT}"')
    replace(tmp_path / "CHANGELOG.md", "## Unreleased", f"## {NEXT} (2026-11-18)")
    replace(tmp_path / "docs/benchmarks.md", "regard 0.1.0 ", f"regard {NEXT} ")
    replace(tmp_path / "docs/comparison.md", "It is at 0.1.0.", f"It is at {NEXT}.")
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), "utf-8")


def test_a_ready_tree_has_no_problems(tree: Path) -> None:
    assert find_problems(NEXT, tree) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("src/regard/__init__.py", NEXT, "9.8.6", "__version__ is 9.8.6"),
        ("CHANGELOG.md", f"## {NEXT} (2026-11-18)", "## Unreleased", "begins with 'Unreleased'"),
        ("docs/benchmarks.md", f"regard {NEXT} ", "regard 9.8.6 ", "run make bench"),
        ("docs/comparison.md", f"It is at {NEXT}.", "It is at 9.8.6.", "says that this is 9.8.6"),
        ("docs/comparison.md", "<!-- bench: targets -->", "<!-- bench: targets -->1", "quotes other figures"),
        ("docs/results.json", '"perplexity": 129', '"perplexity": 128', "quotes other figures"),
        ("docs/comparison.md", "<!-- bench: targets -->", "<!-- bench: no such case -->", "was not measured"),
    ],
)
def test_what_disagrees_is_reported(tree: Path, file: str, old: str, new: str, problem: str) -> None:
    replace(tree / file, old, new)
    problems = find_problems(NEXT, tree)
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_version_is_three_numbers(tree: Path) -> None:
    assert "three numbers" in find_problems("1.0", tree)[0]
