"""The conformance suite: targets, unsupported cases, shrinking, reports, the command and its exit codes."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer")

from regard.check import (
    PROPERTIES,
    Case,
    NotSupported,
    Target,
    UnknownTarget,
    check,
    examine,
    installed_engines,
    target,
)
from regard.check.reports import junit, markdown
from tests.check.broken_attentions import BUGS
from tests.check.clean_attention import attention
from tests.conftest import Command

QUICK = ["output-shape", "mask-polarity"]


@pytest.mark.parametrize(
    "engine", [each for each in installed_engines() if each.name != "flex"], ids=lambda each: each.name
)
def test_an_installed_engine_conforms(engine: Target) -> None:
    failed = [outcome for outcome in check([engine]) if outcome.status == "failed"]
    assert [(outcome.property, outcome.reason) for outcome in failed] == []


def test_the_flex_engine_conforms_on_quick_properties() -> None:
    flex = next(each for each in installed_engines() if each.name == "flex")
    statuses = {outcome.property: outcome.status for outcome in check([flex], [PROPERTIES[name] for name in QUICK])}
    assert set(statuses.values()) == {"passed"}


def test_an_unsupported_capability_is_not_applicable_with_its_reason() -> None:
    outcome = examine(Target("mine", attention, {"dropout": "it has none"}), PROPERTIES["dropout-rate"])
    assert (outcome.status, outcome.reason, outcome.cases) == ("not applicable", "it has none", 0)


def test_a_property_can_be_unsupported_by_name() -> None:
    outcome = examine(Target("mine", attention, {"row-sums": "weights are signed"}), PROPERTIES["row-sums"])
    assert outcome.status == "not applicable"


def test_unsupported_cases_are_counted_and_reported() -> None:
    def limited(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.shape[2] > 3:
            raise NotSupported("no more than three queries")
        return attention(q, k, v, **options)

    outcome = examine(Target("mine", limited), PROPERTIES["query-independence"])
    assert outcome.status == "passed"
    assert outcome.refused == 2
    assert "2 of 4 cases not applicable: no more than three queries" in outcome.reason


def test_a_target_that_supports_nothing_does_not_pass() -> None:
    def limited(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise NotSupported("not today")

    assert {outcome.status for outcome in check([Target("mine", limited)])} == {"not applicable"}


def test_an_unsupported_dtype_is_not_applicable() -> None:
    outcome = examine(Target("mine", attention, dtypes=(torch.float32,)), PROPERTIES["half-range"])
    assert (outcome.status, outcome.reason) == ("not applicable", "it does not support float16")


def test_the_smallest_input_is_found() -> None:
    def wrong_from_five_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = attention(q, k, v, **options)
        return out + 1 if k.shape[2] >= 5 and q.shape[1] >= 2 else out

    outcome = examine(Target("mine", wrong_from_five_keys), PROPERTIES["row-sums"])
    assert outcome.status == "failed"
    assert outcome.case == str(Case(B=1, H=2, Q=1, K=5, D=2))


def test_an_error_of_the_target_is_a_failure_with_its_type() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise IndexError("out of range")

    outcome = examine(Target("mine", broken), PROPERTIES["row-sums"])
    assert (outcome.status, outcome.reason) == ("failed", "raises IndexError: out of range")


def test_the_global_state_of_torch_is_restored() -> None:
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    examine(BUGS["settings_changed"].target("settings_changed"), PROPERTIES["global-state"])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())


def test_alignment_is_reported() -> None:
    outcome = examine(target("torch"), PROPERTIES["alignment"])
    assert (outcome.status, outcome.reason) == ("passed", "causal mask at the top-left, as promised")
    wrong = examine(Target("mine", target("torch").attention, alignment="bottom-right"), PROPERTIES["alignment"])
    assert wrong.reason == "the causal mask of 1 x 2 is promised bottom-right, but is top-left"


def test_a_function_promises_the_options_it_has_parameters_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_attention.py").write_text(
        "def plain(q, k, v, scale=None): ...\n\ndef torchs(q, k, v, attn_mask=None): ..."
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    plain, torchs = target("their_attention:plain"), target("their_attention:torchs")
    assert sorted(plain.unsupported) == ["causal", "dropout", "mask"]
    assert plain.unsupported["mask"] == "the function has no parameter mask"
    assert (torchs.unsupported["dropout"], torchs.alignment) == ("the function has no parameter dropout_p", "top-left")
    assert "mask" not in torchs.unsupported


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash", "package.module:function or one of regard-selected"),
        ("no.such.module:f", "no.such.module:f cannot be imported: No module named 'no'"),
        ("torch:no_such", "torch:no_such cannot be imported"),
        ("torch:__version__", "must be a function or a regard.check.Target, but is"),
    ],
)
def test_an_unknown_target_is_an_error(name: str, message: str, regard: Command) -> None:
    with pytest.raises(UnknownTarget, match=message):
        target(name)
    done = regard("check", "--target", name)
    assert done.code == 2
    assert message in done.err


def test_reports_agree() -> None:
    bug = "inverted_mask"
    targets = [Target("clean", attention), BUGS[bug].target(bug)]
    outcomes = list(check(targets, [PROPERTIES[name] for name in ("row-sums", "mask-polarity")]))
    suites = {suite.get("name"): suite for suite in ET.fromstring(junit(outcomes))}
    assert (suites["clean"].get("failures"), suites[bug].get("failures")) == ("0", "1")
    failure = suites[bug].find("testcase/failure")
    assert failure is not None
    assert "inverted_mask" in str(failure.text)
    text = markdown(targets, outcomes)
    assert f"### {bug}: mask-polarity" in text
    assert "mask_polarity(attend, q, k, v)" in text


def test_the_command_exits_with_0_if_all_properties_hold(regard: Command, tmp_path: Path) -> None:
    result = regard(
        "check", "--target", "tests.check.broken_attentions:CLEAN", "--only", "row-sums", "--junit", tmp_path / "a.xml"
    )
    assert result.code == 0
    assert "row-sums" in result.out
    assert "1 passed, 0 failed" in result.out
    assert ET.parse(tmp_path / "a.xml").getroot().tag == "testsuites"


def test_the_command_prints_the_reason_and_a_program_of_a_failure(regard: Command) -> None:
    name = "torch.nn.functional:scaled_dot_product_attention"
    result = regard("check", "--target", name, "--only", "nan-leaks", "--only", "row-sums")
    assert result.code == 1
    assert "nan in a masked key gives nan" in result.out
    assert "def nan_leaks(attend" in result.out
    report = json.loads(regard("check", "--target", name, "--only", "nan-leaks", "--json").out)
    assert (report["passed"], report["outcomes"][0]["status"]) == (False, "failed")
    with pytest.raises(AssertionError, match="nan in a masked key gives nan"):
        exec(compile(report["outcomes"][0]["code"], "reproduction", "exec"), {"__name__": "reproduction"})


def test_the_command_lists_the_properties(regard: Command) -> None:
    listed = json.loads(regard("check", "--list", "--json").out)
    assert list(listed) == list(PROPERTIES)
    assert all(each["statement"].endswith(".") for each in listed.values())
    assert regard("check", "--list").out.count("masked-rows") >= 1


def test_an_unknown_property_is_an_error(regard: Command) -> None:
    result = regard("check", "--only", "beauty")
    assert result.code == 2
    assert "--only must be one of" in result.err


def test_an_unknown_alignment_is_an_error() -> None:
    with pytest.raises(ValueError, match="alignment must be 'bottom-right' or 'top-left', but is 'middle'"):
        Target("mine", attention, alignment="middle")  # type: ignore[arg-type]
