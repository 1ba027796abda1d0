"""Folders of tiny checkpoints, saved by transformers, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.models.transformers_models import save_their_model

WORDS = [*"the cat sat on mat a dog ran to of who where why is was red blue big".split(), ".", ",", "?"]  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHAT = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message['role'] == 'system' %}the {% endif %}\n"
    "{{ message['content'] + ' . ' }}\n"
    "{% endfor %}{% if add_generation_prompt %}who{% endif %}"
)


def word_tokenizer(*, pairs: bool = True) -> Tokenizer:
    """Return a tokenizer of `WORDS`; with `pairs`, texts are surrounded by [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    if pairs:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def save_checkpoint(folder: Path, case: str, *, pairs: bool = True, **settings: dict[str, Any]) -> Path:
    """Save their model of a case with a tokenizer. settings: values to add to JSON files, by name without suffix."""
    save_their_model(case, folder)
    word_tokenizer(pairs=pairs).save(str(folder / "tokenizer.json"))
    for name, values in settings.items():
        path = folder / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))
    return folder
