"""The page and the notebook: complete, escaped, and without external resources."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from regard.lab import CLAIMS, Result, Text, draw
from regard.lab.draw import INK
from regard.lab.notebook import notebook
from regard.lab.page import page

FEW = ("variance", "equivariance", "permutation-matrices", "example-softmax-3")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def few(results: dict[str, Result]) -> list[Result]:
    return [results[name] for name in FEW]


@pytest.fixture(scope="module")
def pages(few: list[Result]) -> dict[str, str]:
    return {language: page(few, language) for language in ("en", "zh")}


def test_a_page_has_every_claim_with_verdict_formula_picture_and_code(pages: dict[str, str], few: list[Result]) -> None:
    for language, text in pages.items():
        assert text.count("<article") == text.count("<svg") == text.count("<math") == text.count("<pre>") == len(FEW)
        for result in few:
            assert f'id="{result.claim.name}"' in text
            assert result.claim.title.render(language).replace('"', "&#34;") in text
            assert result.verdict.text.render(language) in text


def test_a_page_has_no_scripts_or_external_resources(pages: dict[str, str]) -> None:
    for text in pages.values():
        assert not re.search(r"<script|<link|<iframe|@import|\bsrc=", text)
        links = re.findall(r'href="([^"]{0,30})', text)
        assert all(link.startswith(("#", "data:")) for link in links)
        assert "default-src 'none'" in text


def test_ids_are_unique_and_references_resolve(pages: dict[str, str]) -> None:
    text = pages["en"]
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    referred = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert set(referred) <= set(names)


def test_pictures_take_the_colour_of_the_text(pages: dict[str, str]) -> None:
    assert INK not in pages["en"]
    assert "currentColor" in pages["en"]


def test_texts_are_escaped(few: list[Result]) -> None:
    hostile = "<script>alert('&')</script>"
    claim = replace(
        few[0].claim, title=Text(hostile, hostile), says=Text(hostile, hostile), finding=Text(hostile, hostile)
    )
    text = page([replace(few[0], claim=replace(claim, caption=Text(hostile, hostile)))])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_notebook_holds_formula_code_and_picture(few: list[Result]) -> None:
    cells = json.loads(notebook(few, "zh"))
    code = [cell for cell in cells["cells"] if cell["cell_type"] == "code"]
    assert len(code) == len(FEW)
    for cell, result in zip(code, few, strict=True):
        compile("".join(cell["source"]), "cell", "exec")
        assert result.claim.measure.__name__ in "".join(cell["source"])
        assert "image/png" in cell["outputs"][1]["data"]
    markdown = "".join(line for cell in cells["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    assert all(f"$${result.claim.formula}$$" in markdown for result in few)
    assert "点积的方差等于维度 d" in markdown


def test_a_notebook_cell_runs_unchanged(few: list[Result]) -> None:
    cells = json.loads(notebook(few[3:], "en"))
    space: dict = {}
    exec("".join(next(cell for cell in cells["cells"] if cell["cell_type"] == "code")["source"]), space)
    assert space["findings"] == few[3].findings


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_browser_shows_the_page_without_errors_or_requests(
    language: str, pages: dict[str, str], few: list[Result], tmp_path: Path
) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = tmp_path / "lab.html"
    path.write_text(pages[language], encoding="utf-8")
    messages: list[str] = []
    requests: list[str] = []

    def show() -> tuple[list[str], list[float], bool]:
        with api.sync_playwright() as play:
            browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_page(color_scheme="dark")
            tab.on("console", lambda message: messages.append(message.text))
            tab.on("pageerror", lambda error: messages.append(str(error)))
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto(path.as_uri())
            shown = tab.locator("article").all_inner_texts()
            drawn = tab.evaluate("[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().width)")
            wide = tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            browser.close()
        return shown, drawn, wide

    with ThreadPoolExecutor(1) as pool:  # this thread may already run a browser of other tests
        shown, drawn, wide = pool.submit(show).result()
    assert messages == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert len(shown) == len(FEW)
    assert all(width > 40 for width in drawn)
    assert wide
    for text, result in zip(shown, few, strict=True):
        assert result.claim.says.render(language)[:20] in text


def test_labels_are_chinese_with_and_without_a_font(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a font, letters stay text, which the reader's browser has a font for; a PNG is in English."""
    assert draw.label_picker("zh")("weight", "权重") == "权重"
    assert draw.label_picker("en")("weight", "权重") == "weight"
    claim = CLAIMS["simplex"]
    findings = claim.measure(**claim.quick)
    label = re.compile("[\u4e00-\u9fff]")
    monkeypatch.setattr(draw, "chinese_font", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        without = draw.svg(claim, findings, "zh")
        png = draw.png(claim, findings, "zh")
    assert label.search("".join(re.findall("<text[^>]*>([^<]*)", without)))
    assert "Noto Sans CJK SC" in without
    assert png == draw.png(claim, findings, "en")
    assert "<text" not in draw.svg(claim, findings, "en")


def test_costs_within_a_decade_have_labels() -> None:
    """There is no power of ten between 200 and 900 thousand."""
    from matplotlib.figure import Figure

    from regard.lab.draw import plot_growth

    figure = Figure()
    axis = figure.subplots()
    plot_growth(axis, {"lengths": [64, 128], "bytes": [2.1e5, 8.9e5]}, [("bytes", "n^2")], lambda en, zh: en)
    figure.canvas.draw()
    low, high = axis.get_ylim()
    shown = [
        label.get_text()
        for at, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
        if low <= at <= high
    ]
    assert len([text for text in shown if text]) >= 2
