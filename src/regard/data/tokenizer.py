"""Training and use of tokenizers of the `tokenizers` library."""

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
"""Tokens 0 to 3 of every tokenizer trained by `train_tokenizer`."""


def train_tokenizer(texts: Iterable[str], size: int, *, lower: bool = False) -> Tokenizer:
    """Train a byte-level BPE of at most `size` tokens. It encodes any text, and decoding restores the text.

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
        special_tokens=[
            *SPECIAL[:-1],
            AddedToken(MASK, lstrip=True, special=True),
        ],  # lstrip: the mask replaces a word with its leading space
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with stage("training a tokenizer"):
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
    """Encode each text as ids (n,). special: parse `<mask>` and other special tokens in a text."""
    tokenizer.encode_special_tokens = not special
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]


def special_id(tokenizer: Tokenizer, *names: str) -> int:
    """Id of a special token, by the first of the names that the tokenizer has."""
    for name in names:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise UserError(f"the tokenizer has no token {' or '.join(names)}; train one with regard, or use another")
