"""Recreate the pictures of docs/view: the viewer in Chromium, with the translator of the package.

python -m tests.view.screenshots docs/view
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from regard.cli.view import make_capture
from regard.predictors import open_model
from regard.view import Record, capture
from regard.view.page import page
from regard.view.server import Session
from tests.view import documents
from tests.view.browser import Tab, launch_browser, write
from tests.view.tooltips import served

SIZE = {"width": 1280, "height": 780}
SENTENCE = "He told me that he would help us tomorrow, but I have not seen my brother since last week."
QUESTION = "Where is the station?"
STORY = "The cat sat on the mat because the cat was tired, and the dog that chased the cat sat down next to it. "


def long_text(model: Any, tokenizer: Any) -> Callable[[str], Record]:
    """Return a function that captures the encoder over a text too long for all weights to be in a page."""

    def capture_encoder(text: str) -> Record:
        ids = tokenizer.encode(text).ids
        with torch.no_grad(), capture(model) as record:
            model.encode(torch.tensor([ids]))
        record.title = "The encoder of en-fr"
        return record.decode(tokenizer)

    return capture_encoder


def main(folder: Path) -> None:
    translator = open_model("en-fr")
    capture_text = make_capture(translator)
    record = capture_text(SENTENCE)
    number = next(n for n, each in enumerate(record.attentions) if each.kind == "cross" and each.layer == 1)
    with tempfile.TemporaryDirectory() as pages, launch_browser() as browser:
        urls = {
            "text": write(Path(pages) / "text.html", record.html()),
            "picture": write(Path(pages) / "picture.html", page(documents.picture(9, 12))),
            "sound": write(Path(pages) / "sound.html", page(documents.sound())),
        }

        def shot(name: str, url: str, address: str, act: Callable[[Any], None], dark: bool = False) -> None:
            tab = Tab(browser, color_scheme="dark" if dark else "light")
            tab.page.set_viewport_size(SIZE)
            tab.open(urls.get(url, url), address)
            tab.page.wait_for_timeout(800)
            act(tab.page)
            tab.page.wait_for_timeout(800)
            tab.page.screenshot(path=folder / f"{name}.png")
            assert tab.errors == [], tab.errors
            tab.context.close()

        def chinese(opened: Any) -> None:
            opened.click("[data-act=language]")
            opened.hover(".thumb >> nth=6")

        def typed(opened: Any) -> None:
            opened.fill("textarea", "I have never seen such a beautiful garden.")
            opened.wait_for_function(
                "() => document.querySelector('.note').textContent.includes('jardin')", timeout=60_000
            )
            opened.hover(".column-query .row >> text=jardin")

        one = f"attention={number}&head=3"
        changes = {"off": [[str(number - 2), 0], [str(number - 2), 1]], "temperature": [["", 2]]}
        experiment = f"view=experiment&{one}&cell=2-3&experiment={quote(json.dumps(changes))}"
        shot("heads", "text", "", lambda opened: opened.hover(".thumb >> nth=6"))
        shot("heads-zh-dark", "text", "", chinese, dark=True)
        shot("map", "text", f"view=map&{one}", lambda opened: opened.mouse.move(395, 440))
        shot("tokens", "text", f"view=tokens&{one}", lambda opened: opened.hover(".column-query .row >> text=aider"))
        shot("rollout", "text", "view=rollout", lambda opened: opened.mouse.move(420, 520))
        shot("statistics", "text", f"view=statistics&{one}", lambda opened: None, dark=True)
        shot("image", "picture", "view=image&token=45", lambda opened: opened.mouse.move(500, 600))
        shot("sound", "sound", "view=sound&kind=cross&token=2", lambda opened: opened.mouse.move(700, 330), dark=True)
        with served(Session(capture_text, SENTENCE)) as server:
            shot("why", server, f"view=map&{one}&cell=7-4", lambda opened: None)
            shot("live", server, "view=tokens", typed)
        with served(Session(capture_text, QUESTION)) as server:
            shot("experiment", server, experiment, lambda opened: None)
        with served(Session(long_text(translator.model, record.tokenizer), 40 * STORY)) as server:
            shot("zoom", server, "view=map&rows=420-434&columns=418-430&search=cat", lambda opened: None, dark=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
