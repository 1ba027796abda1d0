"""Text of unknown origin, made safe to print."""

from __future__ import annotations

import unicodedata

SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, format, surrogates, unassigned, line separators
JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji are not written without them


def printable(text: object, *, keep: str = "") -> str:
    """The text with every character that a terminal would act on, or that cannot be seen, as an escape sequence.

    That is control characters (ESC, newlines), characters that reorder text, lone surrogates and unassigned ones.
    keep: characters to leave as they are, such as newlines.

    >>> from regard.printable import printable
    >>> printable("caf\u00e9\\x1b[2J\\n\u202egnp.exe")
    'caf\u00e9\\\\x1b[2J\\\\n\\\\u202egnp.exe'
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(each if each in keep or _is_visible(each) else _escaped(each) for each in text)


def _is_visible(letter: str) -> bool:
    return letter in JOINERS or unicodedata.category(letter) not in INVISIBLE


def _escaped(letter: str) -> str:
    code = ord(letter)
    return SHORT.get(letter) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
