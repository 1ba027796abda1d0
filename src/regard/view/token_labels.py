"""Tokens as labels of a picture: a font that has their letters, and an order in which they can be read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

BOX = "□"
REGULAR = ("normal", "regular", "book", "roman")
LONGEST = 14  # letters of a label
SIGNS = {"\n": "⏎", "\r": "⏎", "\t": "⇥"}
PREFERRED_FONTS = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Sans Thai", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "Arial Unicode MS", "Segoe UI", "SimHei", "WenQuanYi Zen Hei",
)  # fmt: skip


def label(token: str) -> str:
    """A token as it stands at an axis: short, and visible where it is only space."""
    text = "".join(SIGNS.get(letter, letter) for letter in token).strip() or "␣" * bool(token)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def display_width(text: str) -> int:
    """How many columns of a monospaced font a text takes: letters of Chinese, Japanese and Korean take two.

    >>> from regard.view.token_labels import display_width
    >>> display_width("ab"), display_width("注意")
    (2, 4)
    """
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def bidi_order(text: str) -> str:
    """Letters of right-to-left scripts in the order in which they are drawn, where matplotlib does not do it itself.

    Since 3.11 it lays text out by itself; before, python-bidi reverses runs, and without it they stay as they are.
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
    """Names of installed fonts that together have all the letters, or as many as there are fonts for."""
    return _cover(letters)[0]


def drawable(texts: Sequence[str]) -> list[str]:
    """The texts with a box for every letter that no installed font has; a warning names these letters."""
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
    """Fonts for the letters, and the letters that none of them has."""
    from matplotlib.font_manager import fontManager

    chosen: list[str] = []
    missing = {ord(letter) for letter in letters if not letter.isspace()}
    for update_fonts in (lambda: None, _add_new_fonts):  # matplotlib remembers the fonts of its first start
        update_fonts()
        plain: dict[str, str] = {}
        for font in sorted(fontManager.ttflist, key=_boldness):
            if font.style == "normal":
                plain.setdefault(font.name, font.fname)
        # that has boxes
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
    """How far a font is from the regular weight. Some families have no regular one, as WenQuanYi Zen Hei."""
    return abs(font.weight - 400) if isinstance(font.weight, int) else 0 if font.weight in REGULAR else 1000


@lru_cache(maxsize=1)
def _add_new_fonts() -> None:
    """Tell matplotlib of fonts that were installed since it made its list."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {font.fname for font in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        try:
            fontManager.addfont(path)
        except (RuntimeError, OSError, ValueError):  # damaged, or of a kind that it cannot read
            continue


@lru_cache(maxsize=512)
def _letters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (RuntimeError, OSError):
        return frozenset()


def name(ax: Any, axis: str, tokens: Sequence[str], *, at: Sequence[float] | None = None, most: int = 48) -> None:
    """Put tokens at an axis, "x" or "y": all, or where there are many, some at equal distances."""
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


def put_title(ax: Any, text: str, **how: Any) -> None:
    """Any text as the title of a picture, in as many lines as it needs."""
    ax.set_title(drawable([text])[0], wrap=True, **how)
    set_fonts([ax.title])


def set_fonts(texts: Iterable[Any]) -> None:
    """Fonts for what matplotlib texts say; a dollar in it is a dollar."""
    texts = list(texts)
    fonts = font_families(frozenset("".join(each.get_text() for each in texts)))
    for each in texts:
        each.set_fontfamily(fonts)
        each.set_parse_math(False)
