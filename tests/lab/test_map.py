"""The page that says where the theory is names claims, pages, chapters and tests that exist, and all claims."""

from __future__ import annotations

import re
from pathlib import Path

from regard.lab import CLAIMS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    line.rsplit(" | ", 1)
    for line in (DOCS / "theory_map.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| ---") and not line.startswith("| in the texts")
]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_row_names_something() -> None:
    assert len(ROWS) > 60
    for topic, where in ROWS:
        assert re.search(r"`[\w-]+`|\]\(", where), topic


def test_every_claim_exists_and_every_claim_of_the_lab_is_named() -> None:
    named = {
        name
        for _, where in ROWS
        for group in re.findall(r"lab ((?:`[\w-]+`(?:, )?)+)", where)
        for name in re.findall(r"`([\w-]+)`", group)
    }
    assert named == set(CLAIMS)


def test_every_page_and_chapter_exists() -> None:
    for topic, where in ROWS:
        for path, chapter in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", where):
            assert (DOCS / path).exists(), f"{topic}: {path}"
            assert not chapter or chapter in anchors(DOCS / path), f"{topic}: {path}#{chapter}"
