"""The panel that explains a weight: its layout, and normalisations other than softmax."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import quote

import pytest
import torch

pytest.importorskip("uvicorn")
import regard as rg
from regard.view.server import Session
from tests.view.browser import Tab
from tests.view.models import attended
from tests.view.test_experiment import TEXT, look, pick, read_why
from tests.view.tooltips import is_rounded, served


def test_numbers_stay_in_their_step_and_on_their_line(browser: Any) -> None:
    opened, off = Tab(browser), quote(json.dumps({"off": [["0", 1]]}))
    with served(Session(look, TEXT)) as address:
        for query, sides in (("cell=6-3", 1), (f"cell=6-3&experiment={off}", 2)):
            opened.open(address, f"view=experiment&attention=1&head=2&{query}")
            opened.page.wait_for_selector(f".why-side[data-side='{sides - 1}'] .terms")
            beyond = opened.page.eval_on_selector_all(
                ".why .terms", "(all) => all.map((one) => one.getBoundingClientRect().right - "
                "one.parentElement.getBoundingClientRect().right)",
            )  # fmt: skip
            assert len(beyond) == sides
            assert max(beyond) < 1
            lines = opened.page.eval_on_selector_all(
                ".why-value", "(all) => all.map((one) => { const text = document.createRange(); "
                "text.selectNodeContents(one); return text.getClientRects().length })",
            )  # fmt: skip
            assert set(lines) == {1}
    opened.context.close()


def test_a_normalization_that_is_no_softmax_is_named(browser: Any) -> None:
    record = attended(rg.Attention(mask=rg.causal(), normalization=rg.Sigmoid(-1.0)), torch.randn(1, 2, 6, 8))
    opened = Tab(browser)
    with served(Session(lambda text: record, "six")) as address:
        opened.open(address, "view=map&head=1")
        opened.page.wait_for_selector("canvas.plane")
        pick(opened, 4, 2, 6)
        shown = read_why(opened)
    opened.context.close()
    assert shown["Function"] == "Sigmoid(-1.0)"
    assert "Log-sum-exp" not in shown
    logit, weight = record.explain_weight(0, 1, 4, 2).logit, record.weights(0, 1)[4, 2].item()
    assert weight == pytest.approx(1 / (1 + math.exp(1.0 - logit)), rel=1e-5)
    assert is_rounded(shown["Weight"], weight)
