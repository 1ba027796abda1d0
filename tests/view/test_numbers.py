"""Every number that a page or the server shows is the weight, or the mean of the weights, that its label names.

These are some of what `make tooltips` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import regard as rg
from regard.view import capture
from tests.view.browser import Tab, write
from tests.view.models import Attends

pytest.importorskip("uvicorn")
from regard.view.server import Session
from tests.view.tooltips import (
    MAP,
    SIZES,
    Case,
    check_cell,
    is_rounded,
    look,
    read_all,
    read_experiment,
    record_of,
    served,
)  # fmt: skip

CASES = [
    ("saved", Case(30, "bidirectional")), ("server", Case(30, "cross")),
    ("saved", Case(100, "causal")), ("server", Case(100, "bidirectional")),
    ("saved", Case(513, "causal")), ("server", Case(513, "uniform")),
    ("saved", Case(5003, "causal")), ("server", Case(5003, "bidirectional")),
]  # fmt: skip


@pytest.fixture(scope="module")
def opened(browser: Any) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.context.close()
    assert tab.errors == []


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Session, str]]:
    session = Session(look, "30 cross")
    with served(session) as url:
        yield session, url


@pytest.mark.parametrize(("where", "case"), CASES, ids=str)
def test_printed_numbers_are_the_weights(
    opened: Tab, server: tuple[Session, str], tmp_path: Any, where: str, case: Case
) -> None:
    session, url = server
    if where == "server":
        session.run(case.text)
    else:
        url = write(tmp_path / "page.html", record_of(case).html())
    counts = read_all(opened, url, case)
    if where == "server":
        assert read_experiment(opened, url, case, SIZES[case.tokens][0] - 1, 0) > 100
    assert set(counts) >= {"map", "tokens", "image", "sound", "statistics"}
    assert sum(counts.values()) >= 500


def test_uniform_attention_has_one_colour_and_one_number(opened: Tab, tmp_path: Any) -> None:
    """700 is not a multiple of the size of any map."""
    model = Attends(rg.Attention())
    with capture(model) as record:
        model(torch.zeros(1, 60, 700, 4))
    opened.open(write(tmp_path / "even.html", record.html()), "view=map")
    opened.page.wait_for_selector("canvas.plane")
    opened.wait_frames()
    tips = opened.page.evaluate(MAP, torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).tolist())
    assert {re.search(r"eight\s+(\S+)", each)[1] for each in tips} == {f"{1 / 700:.6f}"}
    colours = opened.page.evaluate(
        """() => { const canvas = document.querySelector("canvas.plane"), ratio = devicePixelRatio || 1;
        const [x, y, w, h] = canvas.dataset.plot.split(",").map((edge) => edge * ratio);
        const data = canvas.getContext("2d").getImageData(x + 4, y + 4, w - 8, h - 8).data;
        const found = new Map();
        for (const each of new Uint32Array(data.buffer)) found.set(each, (found.get(each) ?? 0) + 1);
        return Math.max(...found.values()) / (data.length / 4) }"""
    )
    assert colours > 0.98  # all but the outline of the cell under the pointer


@pytest.mark.parametrize(
    ("shown", "number", "right"),
    [("0.8514", 0.85142, True), ("0.8516", 0.85142, False), ("1.2e-8", 1.23e-8, True), ("0", 0.0, True),
     ("0", 1e-12, False), ("<1e-9", 1e-12, True), ("0.85142", 0.85142, False)],
)  # fmt: skip
def test_rounding_is_judged_by_the_printed_digits(shown: str, number: float, right: bool) -> None:
    assert is_rounded(shown, number) == right
    assert math.isfinite(number)


@pytest.mark.parametrize(
    ("tip", "right"),
    [("Query 1\na\nKey 2\nb\nWeight\n0.5000", True), ("Query 1\na\nKey 2\nb\nWeight\n0.5001", False),
     ("Query 1\na\nKey 2\nb\nPooled weight\n0.5000", False),
     ("Queries 0–1\na … b\nKey 2\nb\nPooled weight\n0.2500\nmean of 2 x 1 weights", True),
     ("Queries 0–1\na … b\nKey 2\nb\nWeight\n0.2500", False)],
)  # fmt: skip
def test_a_tooltip_must_label_its_numbers(tip: str, right: bool) -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.5]])
    if right:
        check_cell(tip, lambda rows, columns: weights[rows, columns])
    else:
        with pytest.raises(AssertionError):
            check_cell(tip, lambda rows, columns: weights[rows, columns])
