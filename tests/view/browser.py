"""A real browser for the tests: one for the session, a fresh profile for each page, and no network."""

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


def needed() -> Any:
    """Playwright, or the reason why these tests are skipped."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    return pytest.importorskip("playwright.sync_api", reason="pip install 'regard[test]' brings playwright")


@contextmanager
def launched() -> Iterator[Any]:
    api = needed()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A page that must not ask for anything but itself, nor complain."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self.context = browser.new_context(viewport=SIZE, accept_downloads=True, **context)
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        self.url = ""
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.trouble.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append("a dialog: " + dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:", "about:")):
            self.trouble.append(f"the page asked for {url}")

    def open(self, url: str, address: str = "") -> Tab:
        self.page.goto("about:blank")
        self.page.mouse.move(0, 0)
        self.url = url
        self.page.goto(f"{url}#{address}")
        self.page.wait_for_selector(".regard .view")
        return self

    # What tests do again and again

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def tip(self) -> str:
        self.page.wait_for_selector(".regard .tip:not([hidden])")
        return self.page.inner_text(".regard .tip")

    def settled(self) -> None:
        """Two frames later: what was asked for is drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def plot(self) -> dict[str, float]:
        """Where the cells of the map lie on the screen; the canvas keeps room for labels on its left and top."""
        self.page.wait_for_selector(".regard canvas.plane")
        self.settled()
        return self.page.evaluate(
            """() => { const box = document.querySelector("canvas.plane").getBoundingClientRect();
            return { x: box.left + 116, y: box.top + 84, width: box.width - 126, height: box.height - 94 } }"""
        )

    def point(self, row: float, column: float, rows: float, columns: float) -> None:
        """The pointer over the middle of a cell of a map that shows rows x columns."""
        plot = self.plot()
        x, y = (column + 0.5) * plot["width"] / columns, (row + 0.5) * plot["height"] / rows
        self.page.mouse.move(plot["x"] + x, plot["y"] + y)
        self.settled()


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return path.as_uri()
