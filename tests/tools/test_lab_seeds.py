"""Which verdicts over seeds are kept, and which claims are left out while other jobs run."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from tools.lab_seeds import fingerprint, judges_times

from regard.lab import CLAIMS, Text, architectures
from regard.lab.criteria import at_most


def test_another_wording_keeps_verdicts_and_another_bound_does_not() -> None:
    claim = CLAIMS["hull"]
    (criterion,) = claim.criteria
    assert fingerprint(replace(claim, title=Text("a", "b"))) == fingerprint(claim)
    assert fingerprint(replace(claim, criteria=(replace(criterion, says=Text("a", "b")),))) == fingerprint(claim)
    assert fingerprint(replace(claim, criteria=(replace(criterion, high=1e-9),))) != fingerprint(claim)
    assert fingerprint(replace(claim, criteria=(criterion, at_most("beyond", 1, "a", "b")))) != fingerprint(claim)
    assert fingerprint(replace(claim, repetitions=5)) != fingerprint(claim)


def test_verdicts_are_dropped_if_a_module_of_the_measurement_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource
    before = {name: fingerprint(CLAIMS[name]) for name in ("recall", "hull")}
    monkeypatch.setattr(inspect, "getsource", lambda part: "changed" if part is architectures else source(part))
    assert fingerprint(CLAIMS["recall"]) != before["recall"]
    assert fingerprint(CLAIMS["hull"]) == before["hull"]


def test_claims_about_times_can_be_left_out() -> None:
    timed = {name for name, claim in CLAIMS.items() if judges_times(claim)}
    assert timed == {"dense-cost", "linear-heading", "tiled-cost", "window-cost", "linear-cost", "sparse-cost"}
