"""Measure every claim once with the code that the page shows, each in a separate namespace."""

from __future__ import annotations

from typing import Any

import pytest

from regard.lab import CLAIMS, QUICK, Claim, Result
from regard.lab.complexity import one_thread


def run_alone(claim: Claim, seed: int, **arguments: Any) -> dict[str, Any]:
    """Return the findings of the shown code, run in an empty namespace."""
    function, call = claim.code().rsplit("\n\n\n", 1)
    assert call.startswith(
        f"findings = {claim.measure.__name__}(seed=0)"
    )  # not run here: it measures with the full budget
    space: dict[str, Any] = {}
    exec(compile(function, f"<{claim.name}>", "exec"), space)
    with one_thread():
        return space[claim.measure.__name__](seed=seed, **arguments)


@pytest.fixture(scope="session")
def results() -> dict[str, Result]:
    measured = {}
    for name, claim in CLAIMS.items():
        samples = [run_alone(claim, seed, **claim.quick) for seed in range(QUICK.repetitions(claim))]
        measured[name] = Result(claim, samples, 0, 0.0)
    return measured
