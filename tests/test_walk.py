"""docs/inside/index.md names files and functions; each of them must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/inside/index.md"


def references(text: str) -> list[tuple[str, str]]:
    """Return the (file, name) pairs of the second column: `file`: `name`, `name`, `file`: `name`."""
    results = []
    for row in re.findall(r"^\|[^|]*\| (`[^|]*/?[^|]*`) \|$", text, re.MULTILINE):
        path = ""
        for word in re.findall(r"`([^`]+)`", row):
            if re.search(r"\.(py|cpp|h)$", word):
                path = word
            else:
                results.append((path, word))
    return results


@pytest.mark.parametrize(("path", "name"), references(PAGE.read_text("utf-8")), ids="-".join)
def test_names_of_the_walk_exist(path: str, name: str) -> None:
    file = ROOT / path if path.startswith("csrc/") else ROOT / "src/regard" / path
    text = file.read_text("utf-8")
    *owner, last = name.split(".")
    if path.startswith("csrc/"):
        assert re.search(rf"^[^/\n]*\b{last}\b *[({{]", text, re.MULTILINE), f"{path} does not define {name}"
        return
    if owner:
        match = re.search(rf"^class {owner[0]}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert match, f"{path} has no class {owner[0]}"
        assert re.search(rf"^    def {last}\b", match[0], re.MULTILINE), f"{path} does not define {name}"
        return
    assert re.search(rf"^(def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE), f"{path} does not define {name}"


def test_every_walk_has_steps() -> None:
    assert len(references(PAGE.read_text("utf-8"))) > 60
