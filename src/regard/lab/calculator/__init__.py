"""The calculator: attention of up to eight tokens on a page that computes in the browser."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files


def calculator() -> str:
    """Return the page: one HTML file without requests, in English and Chinese.

    >>> from regard.lab.calculator import calculator
    >>> calculator().startswith("<!doctype html>")
    True
    """
    words = json.dumps(json.loads(_read("words.json")), ensure_ascii=False, separators=(",", ":"))
    style, script = _read("calculator.css"), f"const WORDS = {words};\n{_read('calculator.js')}"
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">', '<link rel="icon" href="data:,">',
        "<title>Attention calculator</title>", f"<style>{style}</style>", "</head>", "<body>",
        _read("calculator.html"), f'<script type="module">{script}</script>', "</body>", "</html>", "",
    ])  # fmt: skip


def _read(name: str) -> str:
    return files("regard.lab.calculator").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
