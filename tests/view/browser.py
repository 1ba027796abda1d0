"""A real browser for the tests: one per session, with a fresh profile per page and no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZE = {"width": 1200, "height": 800}


def import_playwright() -> Any:
    """Return the playwright API, or skip the test."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return pytest.importorskip("playwright.sync_api", reason="pip install --group test")


@contextmanager
def launch_browser() -> Iterator[Any]:
    api = import_playwright()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A browser tab that collects console errors and requests to other addresses."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self.context = browser.new_context(viewport=SIZE, accept_downloads=True, **context)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.url = ""
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append("a dialog: " + dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self._check_request(request.url))

    def _check_request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:", "about:")):
            self.errors.append(f"the page requested {url}")

    def open(self, url: str, address: str = "") -> Tab:
        self.page.goto("about:blank")
        self.page.mouse.move(0, 0)
        self.url = url
        self.page.goto(f"{url}#{address}")
        self.page.wait_for_selector(".regard .view")
        return self

    # Common actions

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def tip(self) -> str:
        self.page.wait_for_selector(".regard .tip:not([hidden])")
        return self.page.inner_text(".regard .tip")

    def wait_frames(self) -> None:
        """Wait for two animation frames, so that pending drawing is done."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def plot(self) -> dict[str, float]:
        """Return the screen rectangle of the cells of the map, without the labels on the left and top."""
        self.page.wait_for_selector(".regard canvas.plane")
        self.wait_frames()
        return self.page.evaluate(
            """() => { const canvas = document.querySelector("canvas.plane"), box = canvas.getBoundingClientRect();
            const [left, top, width, height] = canvas.dataset.plot.split(",").map(Number);
            return { x: box.left + left, y: box.top + top, width, height } }"""
        )

    def point(self, row: float, column: float, rows: float, columns: float) -> None:
        """Move the pointer to the middle of a cell of a map that shows rows x columns."""
        plot = self.plot()
        x, y = (column + 0.5) * plot["width"] / columns, (row + 0.5) * plot["height"] / rows
        self.page.mouse.move(plot["x"] + x, plot["y"] + y)
        self.wait_frames()


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return path.as_uri()
