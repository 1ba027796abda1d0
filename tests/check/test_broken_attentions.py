"""Every bug planted in a copy of the reference is caught by the property that describes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regard.check import PROPERTIES, Outcome, check
from tests.check.broken_attentions import BUGS, CLEAN

ROOT = Path(__file__).parent.parent.parent


def first_failure(name: str) -> Outcome | None:
    outcomes = check([BUGS[name].target(name)])  # lazy: later properties do not run
    return next((outcome for outcome in outcomes if outcome.status == "failed"), None)


def test_the_clean_copy_passes_everything() -> None:
    outcomes = list(check([CLEAN]))
    assert [(outcome.property, outcome.status) for outcome in outcomes] == [(name, "passed") for name in PROPERTIES]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_identified_and_reproduced(name: str) -> None:
    failure = first_failure(name)
    assert failure is not None, f"{BUGS[name].about} is not caught"
    assert failure.property == BUGS[name].property, failure.reason
    kind = RuntimeError if failure.reason.startswith("raises RuntimeError") else Exception
    with pytest.raises(kind) as raised:
        exec(compile(failure.code, name, "exec"), {"__name__": "reproduction"})
    assert type(raised.value) is AssertionError or type(raised.value).__name__ in failure.reason


def test_every_property_catches_a_bug() -> None:
    assert set(PROPERTIES) - {bug.property for bug in BUGS.values()} == set()


def test_a_reproduction_runs_as_a_program(tmp_path: Path) -> None:
    failure = first_failure("causal_off_by_one")
    assert failure is not None
    program = tmp_path / "reproduction.py"
    program.write_text(failure.code)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 1
    assert f"AssertionError: {failure.reason}" in done.stderr
