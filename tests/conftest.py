"""Shared fixtures: settings of Hypothesis, and the command as the shell runs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: on a CPU it can only interpret

quick = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("shrink", **quick)
settings.register_profile("regard", **quick, phases=(Phase.explicit, Phase.generate))
settings.load_profile("regard")


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., CommandResult]


@pytest.fixture
def regard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `regard` with these arguments on a terminal of 200 columns."""
    pytest.importorskip("typer")
    from regard.cli import console, main

    monkeypatch.setattr("regard.cli.stages.FIRST", 1e6)  # on a busy machine any stage may be a long one
    for stream in (console.stderr, console.stdout):
        monkeypatch.setattr(stream, "size", (200, 50))

    def run(*words: object, given: bytes = b"") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return CommandResult(code, *capsys.readouterr())

    return run
