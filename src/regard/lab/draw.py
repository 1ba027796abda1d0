"""Pictures of findings: in SVG, lines and letters take the text colour of the page, light or dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from regard.lab.claim import Claim, Findings, PickLabel

INK = "#010203"  # placeholder, unused otherwise; replaced by currentColor in SVG
COLOURS = ("#4c7fb8", "#d9633f", "#4d9a57", "#9b6fb5", "#c2982f", "#4aa3a1")
CHINESE = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
           "Microsoft YaHei", "PingFang SC", "SimHei", "Noto Serif CJK SC")  # fmt: skip
FAMILIES = ", ".join(f"'{name}'" for name in ("DejaVu Sans", *CHINESE)) + ", sans-serif"


@lru_cache(maxsize=1)
def chinese_font() -> str | None:
    """Return an installed font with Chinese characters, or None."""
    from matplotlib import font_manager

    known = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():  # matplotlib's cached list may be older than the font
        if path not in known and any(name in path for name in ("SansCJK-Regular", "wqy-")):
            font_manager.fontManager.addfont(path)
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return next((name for name in CHINESE if name in installed), None)


def label_picker(language: str) -> PickLabel:
    """Return a function that picks labels in a language."""
    return (lambda en, zh: zh) if language == "zh" else (lambda en, zh: en)


def _style(ink: str, language: str) -> dict[str, Any]:
    as_text = language == "zh" and chinese_font() is None  # letters as text: the reader's browser has a font for them
    fonts = [font for font in (chinese_font() if language == "zh" else None, "DejaVu Sans") if font]
    return {
        "font.family": fonts, "font.size": 9.5, "axes.titlesize": 10, "axes.unicode_minus": False,
        "text.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink, "axes.titlecolor": ink,
        "xtick.color": ink, "ytick.color": ink, "axes.linewidth": 0.6, "axes.spines.top": False,
        "axes.spines.right": False, "axes.prop_cycle": _cycle(), "lines.linewidth": 1.7, "lines.markersize": 4.5,
        "legend.frameon": False, "legend.fontsize": 9, "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none", "figure.constrained_layout.use": True, "grid.linewidth": 0.4, "grid.alpha": 0.25,
        "grid.color": ink,
        "axes.grid": True, "axes.axisbelow": True, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
        "svg.fonttype": "none" if as_text else "path", "image.interpolation": "nearest",
    }  # fmt: skip


def _cycle() -> Any:
    from cycler import cycler

    return cycler(color=COLOURS)


def _draw(claim: Claim, findings: Findings, language: str, save: Callable[[Any], None], ink: str) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = _style(ink, language) | {"svg.hashsalt": claim.name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.6, 3.1))
        FigureCanvasAgg(figure)
        claim.draw(figure, findings, label_picker(language))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            save(figure)


def svg(claim: Claim, findings: Findings, language: str) -> str:
    """Return the picture as an SVG element; its ids start with the name of the claim, so that they are unique."""
    buffer = io.StringIO()
    _draw(claim, findings, language, lambda figure: figure.savefig(buffer, format="svg", metadata={"Date": None}), INK)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", text, count=1)
    text = re.sub(r"<svg ([^>]*?)height=\"[^\"]*\"([^>]*?)width=\"[^\"]*\"", r"<svg \1\2", text, count=1)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{claim.name}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{claim.name}-", text)
    return text.replace(INK, "currentColor").replace("'DejaVu Sans'", FAMILIES).strip()


def png(claim: Claim, findings: Findings, language: str) -> bytes:
    """Return the picture as a PNG, black on white, for a notebook; in English if there is no Chinese font."""
    language = language if chinese_font() else "en"
    buffer = io.BytesIO()
    _draw(
        claim, findings, language,
        lambda figure: figure.savefig(buffer, format="png", dpi=110, facecolor="white"), "#222222",
    )  # fmt: skip
    return buffer.getvalue()


def heatmap(
    axis: Any,
    matrix: Sequence[Sequence[float]],
    title: str,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Draw a matrix as an image, with optional labels of rows and columns."""
    image = axis.imshow(matrix, aspect="auto", **({"cmap": "viridis"} | options))
    axis.set_title(title)
    axis.grid(False)
    for names, ticks, rotation in ((rows, axis.set_yticks, 0), (columns, axis.set_xticks, 90)):
        ticks(range(len(names)), names, rotation=rotation, fontsize=7) if names else ticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image


def plot_growth(axis: Any, findings: Findings, series: Sequence[tuple[str, str]], tr: PickLabel) -> None:
    """Plot costs against length on logarithmic axes; a series is a key of `findings` and a label."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator

    for name, label in series:
        axis.loglog(findings["lengths"], findings[name], "o-", label=label)
    axis.set_xlabel(tr("length n", "长度 n"))
    axis.set_xticks(findings["lengths"], [str(n) for n in findings["lengths"]])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    if high < 20 * low:  # less than two decades: powers of ten alone are too few ticks
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf)))
    axis.legend()
