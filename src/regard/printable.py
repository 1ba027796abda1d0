"""Escape untrusted text so that it is safe to print."""

from __future__ import annotations

import json
import re
from typing import Any

UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")
"""Control characters, line separators, bidirectional controls, lone surrogates and tag characters."""
SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: object, *, keep: str = "") -> str:
    """Return the text on one line, with characters that would control a terminal as escape sequences.

    keep: characters to leave as they are, such as newlines.

    >>> from regard.printable import printable
    >>> printable("caf\u00e9\\x1b[2J\\n\u202egnp.exe")
    'caf\u00e9\\\\x1b[2J\\\\n\\\\u202egnp.exe'
    """
    return UNSAFE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), str(text))


def printable_json(value: Any, *, indent: int | None = None) -> str:
    """Encode a value as JSON that is safe to print; `json.loads` restores the value.

    >>> from regard.printable import printable_json
    >>> printable_json({"label": "\\x9b2J\u202e\u00e9"})
    '{"label": "\\\\u009b2J\\\\u202e\u00e9"}'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else json.dumps(match[0])[1:-1], text)


def _escape(letter: str) -> str:
    code = ord(letter)
    return SHORT_ESCAPES.get(letter) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
