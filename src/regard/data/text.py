"""Texts as token ids, with lengths checked."""

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
    """Ids of one column, between the tokens for begin and end, and which rows they are of (too long ones are bad).

    To cut is to leave out of the middle: a fourth of what fits is the text's beginning, the rest its end, where people
    say what they think.
    """
    begin, end = special_id(tokenizer, BEGIN, "[CLS]"), special_id(tokenizer, END, "[SEP]")
    found, kept = [], []
    for n, ids in enumerate(encode(tokenizer, [row.values[column] for row in rows])):
        if len(ids) + 2 > longest:
            if not cut:
                bad.add(too_long_message(rows[n].place, len(ids) + 2, longest, " or cut long texts with --cut,"))
                continue
            room = longest - 2
            ids = np.concatenate([ids[: room // 4], ids[len(ids) - (room - room // 4) :]])
        found.append(np.concatenate([[begin], ids, [end]]))
        kept.append(n)
    return found, np.array(kept, np.int64)


def too_long_message(place: str, tokens: int, longest: int, more: str = "", option: str = "longest") -> str:
    """What is said of a text that the model cannot take."""
    return (
        f"{place}: has {tokens} tokens, but the model takes {longest}; train with --{option} {tokens},{more} shorten it"
    )


class TextDataset:
    """Texts and what is to be said of each: a number, or nothing."""

    def __init__(self, ids: Sequence[np.ndarray], places: Sequence[str]) -> None:
        self.ids, self.places = Ragged(ids), places
        self.sizes = self.ids.lengths
