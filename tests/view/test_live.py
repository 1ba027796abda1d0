"""The page of a live server: single weights by window, and a new document for every text."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from regard.view.page import pack_array, page, script_json
from tests.view.browser import Tab
from tests.view.documents import Sample, add, empty_document, long


def word_document(text: str) -> Sample:
    """A document of the words of a text."""
    document = empty_document(text, source=text.split() or [""])
    add(document, "encoder", 0, "source", "source", heads=2)
    document.about["note"] = f"{len(text.split())} words"
    document.about["record"] = text
    return document


class Answers(BaseHTTPRequestHandler):
    """Answers like `regard serve`, for one document."""

    document: Sample
    asked: list[dict]

    def do_GET(self) -> None:
        self._send(page(self.document, live=True).encode(), {"Content-Type": "text/html; charset=utf-8"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        if self.path == "/api/window":
            assert body.pop("record") == type(self).document.about["record"]
            attention, head = body.pop("attention"), body.pop("head")
            window = type(self).document.window(attention, head, **body)
            parts = (np.array(window.weights.shape), window.rows, window.columns)
            self._send(b"".join(part.astype("<i4").tobytes() for part in parts) + window.weights.tobytes(), {})
            return
        if "bad" in body["text"]:
            self._send(json.dumps({"error": "the text is <b>bad</b>"}).encode(), {}, 422)
            return
        type(self).document = word_document(body["text"])
        arrays = {}
        for name, array in self.document.arrays.items():
            dtype, shape, data = pack_array(array)
            arrays[name] = {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}
        self._send(script_json({"about": self.document.about, "arrays": arrays}).encode(), {})

    def _send(self, body: bytes, headers: dict, status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def live(browser: Any) -> Iterator[tuple[Tab, type[Answers]]]:
    first = long(301, 1, 2, side=25, tops=4)
    first.about["record"] = "first"
    answers = type("Answers", (Answers,), {"document": first, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    opened = Tab(browser).open(f"http://127.0.0.1:{server.server_port}/")
    yield opened, answers
    opened.context.close()
    server.shutdown()
    server.server_close()


def test_zooming_reaches_single_weights(live: tuple[Tab, type[Answers]]) -> None:
    opened, answers = live
    weights = answers.document.weights["0"][1]
    opened.page.click("[data-head='0/1']")
    opened.point(5, 5, 25, 25)
    assert "Pooled weight" in opened.tip()
    for _ in range(8):
        opened.page.mouse.wheel(0, -250)
        opened.wait_frames()
    for n in range(40):
        opened.point(12 + n / 100, 12, 25, 25)
        if "\nWeight" in opened.tip():
            break
        opened.page.wait_for_timeout(100)
    text = opened.tip()
    query, key = (int(text.split(word)[1].split()[0]) for word in ("Query ", "Key "))
    assert abs(float(text.split("Weight")[1].split()[0]) - weights[query, key].item()) < 1e-4
    assert opened.errors == []


def test_every_cell_of_a_window_that_does_not_divide_is_exact(live: tuple[Tab, type[Answers]]) -> None:
    opened, answers = live
    weights = answers.document.weights["0"][0]
    opened.page.click("[data-view=map]")
    opened.page.wait_for_timeout(300)
    for token, name in ((300, "299–300"), (297, "297–299")):  # 301 tokens in 151 cells: neighbours share a token
        band = slice(*(299, 301) if token == 300 else (297, 300))
        for _ in range(40):
            opened.point(token, token, 301, 301)
            opened.page.mouse.move(*(value + 0.3 for value in spot(opened, token)))
            if f"{name} " in opened.tip().replace("\n", " "):
                break
            opened.page.wait_for_timeout(100)
        mean = weights[band, band].mean().item()
        assert float(re.split("weight", opened.tip())[1].split()[0]) == pytest.approx(mean, rel=6e-4)
    assert opened.errors == []


def spot(opened: Tab, token: int) -> tuple[float, float]:
    plot = opened.plot()
    return tuple(plot[at] + (token + 0.5) * plot[size] / 301 for at, size in (("x", "width"), ("y", "height")))


def test_a_token_shows_all_its_weights_and_not_only_the_top(live: tuple[Tab, type[Answers]]) -> None:
    opened, answers = live
    opened.page.click("[data-view=tokens]")
    opened.page.hover(".column-query .row >> nth=3")
    opened.page.wait_for_selector(".panel-key")
    shown = [float(text) for text in opened.texts(".panel-key .row-value")]
    best = answers.document.weights["0"][0, 3].sort(descending=True).values[: len(shown)]
    assert len(shown) == 14
    np.testing.assert_allclose(shown, best, atol=6e-5)


def test_typing_shows_the_prediction_and_the_attention_of_the_text(live: tuple[Tab, type[Answers]]) -> None:
    opened, answers = live
    opened.page.click("[data-view=tokens]")
    opened.page.locator("textarea").press_sequentially("a new </script> text", delay=5)
    opened.page.wait_for_function("() => document.querySelector('.note').textContent.includes('4 words')")
    assert opened.texts(".column-query .row:not([hidden]) .row-text") == ["a", "new", "</script>", "text"]
    assert len([one for one in answers.asked if "text" in one]) < 6  # not one per letter
    opened.page.hover(".column-query .row >> nth=1")
    opened.page.wait_for_selector(".panel-key")
    shown = [float(text) for text in opened.texts(".panel-key .row-value")]
    np.testing.assert_allclose(
        sorted(shown), sorted(answers.document.weights["0"][0, 1].tolist()), atol=6e-5, rtol=1e-3
    )
    assert opened.errors == []


def test_a_refused_text_shows_the_reason(live: tuple[Tab, type[Answers]]) -> None:
    opened, _ = live
    opened.page.fill("textarea", "a bad text")
    opened.page.wait_for_function("() => document.querySelector('.busy').textContent.includes('failed')")
    assert opened.page.inner_text(".busy") == "failed: the text is <b>bad</b>"
    assert opened.page.inner_text("h1") == "301 tokens"
    assert not opened.page.is_visible(".main")  # the results belong to another text
    opened.page.fill("textarea", "a good text")
    opened.page.wait_for_function("() => document.querySelector('.note').textContent.includes('3 words')")
    assert opened.page.is_visible(".main")
    opened.page.fill("textarea", "")
    assert not opened.page.is_visible(".main")
