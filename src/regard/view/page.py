"""Render a document as one self-contained HTML page: no network, no build step, a strict Content-Security-Policy."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import numpy as np

LANGUAGES = ("en", "zh")
_IMPORT = re.compile(r'import \{ ([\w, ]+) \} from "\./(\w+)\.js";')
_WORDS = re.compile(r'import (\w+) from "\./(\w+\.json)" with \{ type: "json" \};')
_EXPORT = re.compile(r"export (?:async )?(?:function|class|const) (\w+)")
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


class PageContent(Protocol):
    """The data of a page: `about` is JSON-serialisable and refers to `arrays` by name."""

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def arrays(self) -> dict[str, np.ndarray]: ...


def page(document: PageContent, lang: str = "en", *, live: bool = False) -> str:
    """Return the document as one HTML page without external resources.

    live: allow requests to the server that the page was loaded from.

    >>> from types import SimpleNamespace
    >>> about = {"format": "regard.view/1", "title": "</script>", "streams": {}, "attentions": []}
    >>> text = page(SimpleNamespace(about=about, arrays={"x": np.zeros(3, "float16")}))
    >>> text[:15], 'data-dtype="float16"' in text, '"title": "</script>"' in text
    ('<!doctype html>', True, False)
    """
    if lang not in LANGUAGES:
        raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}, but is {lang!r}")
    script, style = bundle("live" if live else "page"), stylesheet(live)
    policy = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data: blob:",
        "connect-src 'self'" if live else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",  # text of a document can never become markup
        "trusted-types 'none'",
    ]
    parts = [
        "<!doctype html>",
        f'<html lang="{"zh-CN" if lang == "zh" else "en"}">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(_clean(str(document.about.get('title', ''))))}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f'<div id="regard" class="regard" data-lang="{lang}"{" data-live" if live else ""}></div>',
        "<noscript>This page needs JavaScript to display attention.</noscript>",
        f'<script type="application/json" id="about">{script_json(document.about)}</script>',
    ]
    for name, array in document.arrays.items():
        dtype, shape, data = pack_array(array)
        parts.append(
            f'<script type="application/octet-stream" id="array-{html.escape(name)}" data-dtype="{dtype}" '
            f'data-shape="{",".join(map(str, shape))}">{base64.b64encode(data).decode()}</script>'
        )
    parts += [f'<script type="module">{script}</script>', "</body>", "</html>", ""]
    return "\n".join(parts)


def pack_array(array: np.ndarray) -> tuple[str, list[int], bytes]:
    """Return the dtype name, the shape and the gzipped little-endian bytes of an array.

    >>> pack_array(np.zeros((2, 3), "uint8"))[:2]
    ('uint8', [2, 3])
    """
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.dtype.name, list(array.shape), gzip.compress(data.tobytes(), 6, mtime=0)


def script_json(value: Any) -> str:
    """Serialise to JSON that is safe inside a script element; NaN and infinity become null.

    >>> script_json({"a": "</script>", "b": float("nan")})
    '{"a": "\\\\u003c/script\\\\u003e", "b": null}'
    """
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


@cache
def bundle(entry: str) -> str:
    """Return `static/<entry>.js` and the modules that it imports as one module.

    Each module becomes a function that is called once and returns its exports, so that names do not collide. Comments
    and indentation are left out, so no text may contain a line break.
    """
    order: dict[str, str] = {}

    def add(name: str, outermost: bool) -> None:
        exported, lines = [], []
        for line in static(f"{name}.js").splitlines():
            if match := _IMPORT.fullmatch(line):
                if match[2] not in order:
                    add(match[2], False)
                line = f"const {{ {match[1]} }} = ${match[2]};"
            elif match := _WORDS.fullmatch(line):
                line = f"const {match[1]} = {script_json(json.loads(static(match[2])))};"
            elif (match := _EXPORT.match(line)) and not outermost:
                exported.append(match[1])
                line = line.removeprefix("export ")
            elif line.startswith(("import", "export")) and not outermost:
                raise ValueError(f"{name}.js: expected an import or export of one of the bundled forms, got {line!r}")
            if not (line := line.strip()).startswith("//"):
                lines.append(line)
        body = "\n".join(lines)
        if not outermost:
            body = f"const ${name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"
        order[name] = body

    add(entry, True)
    text = "\n".join(order.values()) + "\n"
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a module must not contain '</script' or '<!--', which would end its script element")
    return text


def static(name: str) -> str:
    """Return the text of a front-end file."""
    return files("regard.view").joinpath("static", name).read_text("utf-8")


def stylesheet(live: bool) -> str:
    """Return the style of a saved page, or that of a live one."""
    return static("style.css") + (static("live.css") if live else "")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def finite(value: Any) -> Any:
    """Return plain data for JSON; NaN and infinity become None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
