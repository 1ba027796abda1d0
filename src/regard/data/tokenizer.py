"""Tokenizers, learnt from the data by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.errors import UserError
from regard.progress import stage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END, MASK = "<pad>", "<s>", "</s>", "<mask>"
SPECIAL = (PAD, BEGIN, END, MASK)
"""Tokens 0 to 3 of every tokenizer that is learnt here."""


def train_tokenizer(texts: Iterable[str], size: int, *, lower: bool = False) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens: no text is unknown to it, and decoding gives the text back.

    >>> from regard.data.tokenizer import train_tokenizer
    >>> tokenizer = train_tokenizer(["the cat sat", "the mat"] * 10, 300)
    >>> tokenizer.decode(tokenizer.encode("the naïve cat").ids)
    'the naïve cat'
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Lowercase()] if lower else steps)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL[:-1], AddedToken(MASK, lstrip=True, special=True)],  # the space is the word's
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with stage("training a tokenizer"):
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    """Ids (n,) of each text. special: whether `<mask>` and the like in a text are tokens, and not letters."""
    tokenizer.encode_special_tokens = not special
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in found]


def special_id(tokenizer: Tokenizer, *names: str) -> int:
    """The id of a special token, by the first of the names that the tokenizer knows."""
    for name in names:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    raise UserError(f"the tokenizer has no token {' or '.join(names)}; learn one with regard, or choose another")
