"""Every claim measured once, by the code that the page shows, each in a namespace of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from regard.lab import CLAIMS, Claim, Result
from regard.lab.clock import one_thread


class Said(NamedTuple):
    code: int
    out: str
    err: str


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


@pytest.fixture
def regard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs the command as the shell would."""
    pytest.importorskip("typer")
    from regard import cli

    for console in (cli.told, cli.shown):
        monkeypatch.setattr(console, "size", (200, 50))

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return run
