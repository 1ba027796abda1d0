"""Token labels for plots: fonts that contain their characters, and the display order of right-to-left text."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

BOX = "□"
REGULAR = ("normal", "regular", "book", "roman")
LONGEST = 14  # most characters of a label
SIGNS = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}
PREFERRED_FONTS = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "Arial Unicode MS", "Segoe UI", "SimHei", "WenQuanYi Zen Hei",
)  # fmt: skip


def label(token: str) -> str:
    """Return the axis label of a token: shortened, with visible signs for whitespace."""
    text = "".join(SIGNS.get(letter, letter) for letter in token).strip() or "␣" * bool(token)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def isolate(text: str) -> str:
    r"""Return a text that does not reorder the text around it, if it has letters or controls of right-to-left text.

    >>> from regard.view.token_labels import isolate
    >>> isolate("ab"), ascii(isolate("\u05d0"))
    ('ab', "'\\u2068\\u05d0\\u2069'")
    """
    from unicodedata import bidirectional

    reorders = any(bidirectional(letter) in ("R", "AL", "RLE", "RLO", "RLI", "LRE", "LRO", "PDF") for letter in text)
    return f"\u2068{text}\u2069" if reorders else text


def display_width(text: str) -> int:
    """Return the number of monospaced columns of a text; Chinese, Japanese and Korean characters take two.

    >>> from regard.view.token_labels import display_width
    >>> display_width("ab"), display_width("注意")
    (2, 4)
    """
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def bidi_order(text: str) -> str:
    """Reorder right-to-left text for versions of matplotlib that do not.

    Matplotlib 3.11 and later need no help. Before, python-bidi reorders the text; without it, the text is unchanged.
    """
    from unicodedata import bidirectional

    import matplotlib

    if not any(bidirectional(letter) in ("R", "AL") for letter in text) or _version(matplotlib.__version__) >= (3, 11):
        return text
    try:
        from bidi.algorithm import get_display
    except ImportError:
        return text
    return str(get_display(text))


def _version(text: str) -> tuple[int, int]:
    first, second = text.split(".")[:2]
    return int(first), int("".join(filter(str.isdigit, second)) or 0)


def font_families(letters: frozenset[str]) -> list[str]:
    """Return installed fonts that together contain the letters, or as many of them as possible."""
    return _cover(letters)[0]


def drawable(texts: Sequence[str]) -> list[str]:
    """Return the texts with a box for every letter that no installed font has, and warn about these letters."""
    missing = _cover(frozenset("".join(texts)))[1]
    if missing:
        some = "".join(sorted(missing)[:8])
        warnings.warn(
            f"no installed font has {some!r}{' and others' if len(missing) > 8 else ''}: drawn as {BOX}. Install a "
            "font that has these letters, such as the Debian package fonts-noto-cjk for Chinese, Japanese and Korean",
            stacklevel=2,
        )
    return [bidi_order("".join(BOX if letter in missing else letter for letter in text)) for text in texts]


@lru_cache(maxsize=256)
def _cover(letters: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return fonts for the letters, and the letters that no font has."""
    from matplotlib.font_manager import fontManager

    chosen: list[str] = []
    missing = {ord(letter) for letter in letters if not letter.isspace()}
    for update_fonts in (lambda: None, _add_new_fonts):  # matplotlib caches its list of fonts
        update_fonts()
        plain: dict[str, str] = {}
        for font in sorted(fontManager.ttflist, key=_boldness):
            if font.style == "normal":
                plain.setdefault(font.name, font.fname)
        # the Last Resort font has a placeholder box for every letter
        others = sorted(name for name in set(plain) - set(PREFERRED_FONTS) if "Last Resort" not in name)
        for name in (*(name for name in PREFERRED_FONTS if name in plain), *others):
            have = _letters(plain[name]) if missing or not chosen else frozenset()
            if name not in chosen and (not chosen or missing & have):
                chosen.append(name)
                missing -= have
        if not missing:
            break
    return chosen or ["sans-serif"], frozenset(map(chr, missing))


def _boldness(font: Any) -> int:
    """Return the distance from the regular weight, since some families have none, such as WenQuanYi Zen Hei."""
    return abs(font.weight - 400) if isinstance(font.weight, int) else 0 if font.weight in REGULAR else 1000


@lru_cache(maxsize=1)
def _add_new_fonts() -> None:
    """Add fonts that were installed after matplotlib cached its list."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {font.fname for font in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        try:
            fontManager.addfont(path)
        except (RuntimeError, OSError, ValueError):  # damaged, or an unsupported format
            continue


@lru_cache(maxsize=512)
def _letters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (RuntimeError, OSError):
        return frozenset()


def name(ax: Any, axis: str, tokens: Sequence[str], *, at: Sequence[float] | None = None, most: int = 48) -> None:
    """Label an axis, "x" or "y", with tokens; above `most` tokens, with evenly spaced ones."""
    step = max(1, -(-len(tokens) // most))
    places = list(range(0, len(tokens), step))
    texts = drawable([label(tokens[n]) for n in places])
    where = [n if at is None else at[n] for n in places]
    (ax.set_xticks if axis == "x" else ax.set_yticks)(where, texts)
    labels = ax.get_xticklabels() if axis == "x" else ax.get_yticklabels()
    set_fonts(labels)
    for each in labels:
        each.set_fontsize(8 if len(places) <= 32 else 6)
        if axis == "x":
            each.set_rotation(90)


def put_title(ax: Any, text: str, **options: Any) -> None:
    """Set the title of a plot to any text, wrapped into lines."""
    ax.set_title(drawable([text])[0], wrap=True, **options)
    set_fonts([ax.title])


def set_fonts(texts: Iterable[Any]) -> None:
    """Set fonts that contain the letters of matplotlib texts, and draw dollar signs literally."""
    texts = list(texts)
    fonts = font_families(frozenset("".join(each.get_text() for each in texts)))
    for each in texts:
        each.set_fontfamily(fonts)
        each.set_parse_math(False)
