"""Every claim measured once, by the code that the page shows, each in a namespace of its own."""

from __future__ import annotations

from typing import Any

import pytest

from regard.lab import CLAIMS, Claim, Result
from regard.lab.complexity import one_thread


def alone(claim: Claim, **arguments: Any) -> dict[str, Any]:
    """What the shown code finds when it runs with nothing around it."""
    shown = claim.code().rsplit("\n\n\nfound = ", 1)[0]
    space: dict[str, Any] = {}
    exec(compile(shown, f"<{claim.name}>", "exec"), space)
    with one_thread():
        return space[claim.measure.__name__](seed=0, **arguments)


@pytest.fixture(scope="session")
def results() -> dict[str, Result]:
    made = {}
    for name, claim in CLAIMS.items():
        found = alone(claim, **claim.quick)
        made[name] = Result(claim, found, claim.judge(found), 0, 0.0)
    return made
