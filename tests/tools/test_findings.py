"""docs/findings.md is rendered from docs/findings.json, whose programs are valid Python."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from tools.findings import DATA, PAGE, collect, program, render

ROOT = Path(__file__).parents[2]


def stored() -> dict:
    return json.loads((ROOT / DATA).read_text("utf-8"))


def test_the_page_is_rendered_from_the_data() -> None:
    assert (ROOT / PAGE).read_text("utf-8") == render(stored()), "run `python -m tools.findings`"


def test_every_failure_has_a_program() -> None:
    for target in stored()["targets"]:
        for outcome in target["outcomes"]:
            assert bool(outcome["program"]) == (outcome["status"] == "failed")
            ast.parse(outcome["program"])


def test_program_of_a_missing_failure_is_an_error() -> None:
    assert "attend" in program(stored(), "torch", "nan-leaks")
    with pytest.raises(SystemExit, match="has no failure of output-shape"):
        program(stored(), "torch", "output-shape")


def test_collected_outcomes_can_be_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    import regard.check

    kept = {name: regard.check.PROPERTIES[name] for name in ("output-shape", "nan-leaks")}
    monkeypatch.setattr(regard.check, "PROPERTIES", kept)
    page = render(collect(["torch"]))
    assert "| output-shape | ✓ |" in page
    assert "| nan-leaks | **✗** |" in page
