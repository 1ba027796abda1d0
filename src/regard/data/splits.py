"""Splits of rows into training and held-out data."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Sequence

from regard.data.readers import Row
from regard.errors import UserError


def normalize_text(text: str, *, loosely: bool) -> str:
    """A key that is equal for texts which a tokenizer cannot distinguish.

    loosely: also ignore case, accents and spaces, which some tokenizers remove.

    >>> from regard.data.splits import normalize_text
    >>> normalize_text(" Caf\u00e9 noir", loosely=False), normalize_text(" Caf\u00e9 noir", loosely=True)
    ('Caf\u00e9 noir', 'cafenoir')
    """
    if not loosely:
        return unicodedata.normalize("NFC", text).strip()
    letters = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(each for each in letters if unicodedata.category(each)[0] not in "MZC")


def split(rows: Sequence[Row], group: Callable[[Row], str], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Split off the rows of `held_out` groups, chosen by a hash, independent of the order of the rows."""

    def key(name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True)).digest()

    names = sorted({group(row) for row in rows}, key=lambda name: (key(name), name))
    if held_out >= len(names):
        raise UserError(
            f"cannot hold out {held_out} of {len(names)} distinct examples; use more data, a lower --held-out, or a "
            "file with --validation"
        )
    out = set(names[:held_out])
    return [row for row in rows if group(row) not in out], [row for row in rows if group(row) in out]
