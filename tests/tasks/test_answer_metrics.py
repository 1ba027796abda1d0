"""Metrics of question answering, and the threshold of unanswerable questions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regard.training import metrics


@pytest.mark.parametrize(
    ("output", "references", "exact", "f1"),
    [
        ("The  Cat!", ["cat"], 100, 100),
        ("a big cat", ["cat", "the big cat"], 100, 100),
        ("a big cat", ["cat"], 0, 200 / 3),
        ("cat cat", ["cat"], 0, 200 / 3),
        ("dog", ["cat"], 0, 0),
        ("", ["cat"], 0, 0),
        ("cat", [], 0, 0),
        ("", [], 100, 100),
        ("U.S.", ["US"], 100, 100),
        ("well-known", ["well known"], 0, 0),
        ("theme", ["me"], 0, 0),
    ],
)
def test_an_answer_is_judged_as_by_squads_script(output: str, references: list[str], exact: float, f1: float) -> None:
    assert metrics.answer(output, references) == (pytest.approx(exact), pytest.approx(f1, rel=1e-5))


def test_figures_tell_both_kinds_of_questions_apart() -> None:
    figures = metrics.answers(["cat", "big dog", "", "x"], [["cat"], ["dog"], [], []])
    assert figures["exact"] == pytest.approx(50)
    assert figures["f1"] == pytest.approx((100 + 200 / 3 + 100) / 4, rel=1e-5)
    assert figures["exact_answerable"] == pytest.approx(50)
    assert figures["f1_answerable"] == pytest.approx((100 + 200 / 3) / 2, rel=1e-5)
    assert figures["exact_unanswerable"] == pytest.approx(50)
    assert set(metrics.answers(["cat"], [["cat"]])) == {"exact", "f1"}


def test_the_threshold_is_the_best_of_all() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        absences = draw.normal(size=9).tolist()
        references = [["cat"] if each else [] for each in draw.integers(0, 2, 9)]
        outputs = [["cat", "dog", "big cat"][n] for n in draw.integers(0, 3, 9)]

        rows = list(zip(absences, outputs, references, strict=True))
        highest = max(_f1(rows, edge) for edge in (-99.0, *absences, 99.0))
        assert _f1(rows, metrics.best_threshold(absences, outputs, references)) == pytest.approx(highest)


def _f1(rows: list[tuple[float, str, list[str]]], threshold: float) -> float:
    results = [metrics.answer("" if absence > threshold else output, right) for absence, output, right in rows]
    return float(np.mean([each[1] for each in results]))


# The command, and checkpoints


def test_the_best_threshold_never_separates_questions_of_equal_absence() -> None:
    """Equal absence scores cannot be separated by a threshold, in any order."""
    chance = np.random.default_rng(1)
    for _ in range(60):
        absences = chance.integers(0, 4, 7).astype(float).tolist()
        right = chance.integers(0, 3, 7).tolist()  # answered right, answered wrong, or none is right
        references = [["cat"] if kind < 2 else [] for kind in right]
        outputs = ["dog" if kind == 1 else "cat" for kind in right]

        def f1(threshold: float, scored: tuple[Any, ...] = (absences, outputs, references)) -> float:
            answers = ["" if absence > threshold else output for absence, output, _ in zip(*scored, strict=True)]
            return metrics.answers(answers, scored[2])["f1"]

        highest = max(f1(threshold) for threshold in (-1.0, 0.5, 1.5, 2.5, 4.0))
        assert f1(metrics.best_threshold(absences, outputs, references)) == pytest.approx(highest)


def test_the_best_threshold_separates_neighbouring_numbers() -> None:
    low = float(np.nextafter(1.0, 2))
    high = float(np.nextafter(low, 2))  # their midpoint is rounded to it
    threshold = metrics.best_threshold([low, high], ["cat", "dog"], [["cat"], []])
    assert low <= threshold < high
