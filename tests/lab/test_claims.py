"""Every item of the theory has a claim, and every claim is measured by the code that it shows."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from regard.lab import CLAIMS, ITEMS, QUICK, THEMES, Result, Verdict, measure
from regard.lab.criteria import Criterion, at_least, at_most, between
from regard.lab.draw import _style, label_picker

THEORY = [
    *(f"mechanism {n}" for n in range(1, 10)),
    *(f"claim {n}" for n in range(1, 13)),
    *(f"example {n}" for n in range(1, 7)),
    "approximation",
    "normalization",
    "bottleneck",
    "jacobian",
    "sigma",
    "row sums",
    "extrapolation",
    "stable gradients",
    "several heads",
    "stability",
]
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_every_item_of_the_theory_has_a_claim() -> None:
    assert list(ITEMS) == THEORY
    measured = {item for claim in CLAIMS.values() for item in claim.of}
    assert measured == set(THEORY)


def test_every_claim_is_in_a_chapter() -> None:
    assert {claim.theme for claim in CLAIMS.values()} == set(THEMES)


@pytest.mark.parametrize("name", CLAIMS)
def test_the_shown_code_runs_alone_and_its_numbers_fit_both_languages(name: str, results: dict[str, Result]) -> None:
    result = results[name]
    assert isinstance(result.verdict, Verdict)
    for language in ("en", "zh"):
        json.dumps(result.as_json(language), allow_nan=False)
        finding = result.sentence(language)
        assert "{" not in finding
        assert bool(CHINESE.search(finding)) == (language == "zh")
        assert len(result.judgements) == len(result.claim.criteria) > 0
        for judgement in result.judgements:
            assert bool(CHINESE.search(judgement.render(language))) == (language == "zh")


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_have_texts_in_both_languages(name: str) -> None:
    claim = CLAIMS[name]
    for text in (claim.says, claim.caption, *([] if claim.title.en == claim.title.zh else [claim.title])):
        assert CHINESE.search(text.zh)
        assert not CHINESE.search(text.en)
        outside = re.sub(r"\{[^}]*\}", "", text.zh)
        assert not re.search(r"[\u4e00-\u9fff][,:;?]", outside), "marks in Chinese are full-width"


@pytest.mark.parametrize("name", CLAIMS)
def test_formulas_convert_to_mathml_completely(name: str) -> None:
    from regard.lab.page import mathml

    markup = mathml(CLAIMS[name].formula)
    ElementTree.fromstring(markup)
    assert "\\" not in markup


@pytest.mark.parametrize("name", CLAIMS)
def test_findings_are_drawn(name: str, results: dict[str, Result]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure()
    with matplotlib.rc_context(_style("#222222", "en")):
        results[name].claim.draw(figure, results[name].findings, label_picker("en"))
    assert all(axis.has_data() for axis in figure.axes)


@pytest.mark.parametrize(
    ("criterion", "numbers", "closest", "measured"),
    [
        (at_least("x", 0.9, "x", "数"), (0.95, 0.99), 0.95, "0.95 (least of 2 repetitions)"),
        (at_least("x", 0.9, "x", "数"), (0.1, 0.3), 0.3, "0.3 (greatest of 2 repetitions)"),
        (at_least("x", 0.9, "x", "数"), (0.1, 0.99), 0.1, "0.1 (least of 2 repetitions)"),
        (at_most("x", 0.1, "x", "数"), (0.01, 0.05), 0.05, "0.05 (greatest of 2 repetitions)"),
        (at_most("x", 0.1, "x", "数"), (0.2, 0.7), 0.2, "0.2 (least of 2 repetitions)"),
        (between("x", 1, 2, "x", "数"), (1.2, 1.9), 1.9, "1.2 to 1.9 (2 repetitions)"),
    ],
)
def test_the_printed_number_is_the_one_closest_to_another_verdict(
    criterion: Criterion, numbers: tuple[float, float], closest: float, measured: str
) -> None:
    judgement = criterion.judge([{"x": number} for number in numbers])
    assert judgement.closest == closest
    assert f": {measured}; required" in judgement.render("en")


def test_what_a_finding_says_of_every_repetition_is_true_of_every_repetition() -> None:
    sentence = Result(CLAIMS["information"], [{"kept": 1e-9}, {"kept": 0.02}], 0, 0.0).sentence("en")
    assert "differ by at most 2e-02" in sentence


@pytest.mark.parametrize("name", ["variance", "equivariance", "masks", "memory-length", "example-weights"])
def test_the_shown_code_equals_the_measurement(name: str, results: dict[str, Result]) -> None:
    assert measure(CLAIMS[name], budget=QUICK).findings == results[name].findings


@pytest.mark.parametrize("name", ["variance", "saturation", "equivariance", "hull", "favor-error", "invariance"])
def test_another_seed_changes_numbers_but_no_verdict(name: str, results: dict[str, Result]) -> None:
    other = measure(CLAIMS[name], seed=7, budget=QUICK)
    assert other.findings != results[name].findings
    assert other.verdict is results[name].verdict


def test_known_numbers_are_reproduced(results: dict[str, Result]) -> None:
    findings = {name: result.findings for name, result in results.items()}
    assert findings["variance"]["plain64"] == pytest.approx(64, rel=0.05)
    assert findings["range"]["within24"] == pytest.approx(0.9966, abs=0.002)
    assert findings["range"]["within20"] == pytest.approx(0.987, abs=0.004)
    assert findings["dense-cost"]["at_10000"] == 10**8
    assert findings["overflow"]["from_float32"] == 89
    assert findings["example-weights"]["weights"] == pytest.approx([3.07e-5, 0.99997], rel=1e-2)
    assert findings["example-weights"]["from_printed"] == pytest.approx([11.84, 12.84, 13.84], abs=0.005)
    assert findings["example-softmax-3"]["right"] == pytest.approx([0.9975, 0.0025], abs=5e-5)
    assert findings["example-softmax-8"]["right"] == pytest.approx([0.9966, 0.0025, 0.0009], abs=5e-5)
    assert findings["example-softmax-2"]["right"] == pytest.approx([0.918, 0.075, 0.006], abs=8e-4)
