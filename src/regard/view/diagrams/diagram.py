"""The architecture of a model as a picture."""

from __future__ import annotations

from html import escape
from pathlib import Path

from torch import nn

from regard.files import write_text_atomically
from regard.view.diagrams.drawing import clean, draw
from regard.view.diagrams.parts import Columns, Reader
from regard.view.diagrams.words import words
from regard.view.page import LANGUAGES


def diagram(model: nn.Module, *, name: str = "", lang: str = "en", standalone: bool = False) -> str:
    """Return the architecture of a model as SVG: modules, sizes, parameters, residual connections and attention.

    Layers with equal sizes and descriptions are drawn once. A box is a link that shows the details of its module:
    its place, class, tensors, and for attention the formula, mask, bias and positions. There are no scripts.
    Modules of other libraries are drawn in the order of their definition, without residual connections.

    name: shown above the diagram, by default the class of the model. lang: "en" or "zh".
    standalone: whether to return an HTML page instead.

    >>> import regard as rg, regard.view, torch
    >>> config = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=12, heads=4, d_hidden=64)
    >>> svg = rg.view.diagram(rg.models.LanguageModel(config))
    >>> "Layer × 12, layers 0 to 11" in svg, "causal()" in svg
    (True, True)
    """
    if lang not in LANGUAGES:
        raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}, but is {lang!r}")
    say = words(lang)
    parts = Reader(model, say).read()
    if not parts:
        raise ValueError(f"{type(model).__name__} has neither submodules nor parameters, so there is nothing to draw")
    name = name or type(model).__name__
    first, ends = parts[0], ["input"]
    if isinstance(first, Columns) and first.attends and hasattr(model, "queries"):
        ends = ["image", ""]  # the decoder of a detector starts from learned queries
    elif isinstance(first, Columns):
        ends = ["source", "target"] if first.attends else ["image", "text"]
    svg = draw(parts, name, [say(end) if end else "" for end in ends], say("output"), say)
    return _page(svg, name, lang) if standalone else svg


def save_diagram(model: nn.Module, path: Path, *, name: str = "", lang: str = "en") -> None:
    """Write the diagram of a model to an .svg or .html file."""
    write_text_atomically(path, diagram(model, name=name, lang=lang, standalone=path.suffix.lower() == ".html"))


def _page(svg: str, name: str, lang: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join([
        "<!doctype html>", f'<html lang="{"zh-CN" if lang == "zh" else "en"}">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">', f"<title>{escape(clean(name))}</title>",
        "<style>body { margin: 0; } svg { display: block; margin: 0 auto; max-width: 100%; height: auto; }</style>",
        "</head>", "<body>", svg, "</body>", "</html>", "",
    ])  # fmt: skip
