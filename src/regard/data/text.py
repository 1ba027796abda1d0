"""Encoding of texts as token ids, with a limit on the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.data.batches import Ragged
from regard.data.readers import Row
from regard.data.tokenizer import BEGIN, END, encode, special_id
from regard.errors import BadRows

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def encode_texts(
    tokenizer: Tokenizer, rows: Sequence[Row], column: int, bad: BadRows, *, longest: int, cut: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """Encode one column, with begin and end tokens, and return the indices of the rows; too long ones are bad.

    `cut` removes the middle of long texts: a quarter of what fits is from the start and the rest from the end, where
    reviews usually state their conclusion.
    """
    begin, end = special_id(tokenizer, BEGIN, "[CLS]"), special_id(tokenizer, END, "[SEP]")
    encoded, kept = [], []
    for n, ids in enumerate(encode(tokenizer, [row.values[column] for row in rows])):
        if len(ids) + 2 > longest:
            if not cut:
                bad.add(too_long_message(rows[n].place, len(ids) + 2, longest, " truncate long texts with --cut,"))
                continue
            room = longest - 2
            ids = np.concatenate([ids[: room // 4], ids[len(ids) - (room - room // 4) :]])
        encoded.append(np.concatenate([[begin], ids, [end]]))
        kept.append(n)
    return encoded, np.array(kept, np.int64)


def too_long_message(place: str, tokens: int, longest: int, more: str = "", option: str = "longest") -> str:
    """Error message for a text that is too long for the model."""
    return (
        f"{place}: has {tokens} tokens, but the model takes at most {longest}; "
        f"train with --{option} {tokens},{more} or shorten it"
    )


class TextDataset:
    """Encoded texts; the base of datasets of texts."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.ids, self.places = Ragged(ids), places
        self.sizes = self.ids.lengths
