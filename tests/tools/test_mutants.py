"""The bugs of `make mutants` refer to code that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_the_code_to_replace_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / "src" / "regard" / mutant.file).read_text().count(mutant.right) == 1
    assert all(Path(ROOT, test).exists() for test in mutant.tests.split())
