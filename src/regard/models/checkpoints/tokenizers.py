"""Tokenizers stored with checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.field_types import MAX_INT, short_repr
from regard.files import read_text, write_atomically
from regard.models.checkpoints import gguf
from regard.models.checkpoints.files import CONFIG, first_line, read_json, resolve_folder, write_json
from regard.models.text import SentenceEmbedder, TextEncoder
from regard.printable import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, LENGTH = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "sentence_bert_config.json",
)  # fmt: skip
LONGEST = 1 << 20  # tokens that a text may be padded to


def tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """See `regard.models.checkpoints.api`."""
    if gguf.is_gguf(folder):
        return gguf.tokenizer(gguf.GgufFile(folder))
    path = resolve_folder(folder) / TOKENIZER
    if not path.exists() and (path.parent / VOCABULARY).exists() and _is_ctc_tokenizer(path.parent):
        return _ctc_tokenizer(path.parent)
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no {TOKENIZER}; in transformers, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one from other files"
        )
    return read_tokenizer(path)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; raise if its padding or truncation settings are not plausible."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "reading tokenizers needs the tokenizers library: pip install 'regard[checkpoints]'"
        ) from None
    text = read_text(path)
    try:
        parsed = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # a panic in the library is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{path} is not a valid tokenizer: {printable(first_line(error))[:300]}") from None
    if parsed.post_processor is not None:
        _check_templates(path, json.loads(parsed.post_processor.__getstate__()))
    padding, truncation = parsed.padding or {}, parsed.truncation or {}
    for name in ("length", "pad_to_multiple_of"):
        if (padding.get(name) or 0) > LONGEST:
            raise ValueError(f"{path}: {name} of padding must be at most {LONGEST}, got {padding[name]}")
    if truncation and not 0 <= truncation["stride"] < truncation["max_length"]:
        raise ValueError(
            f"{path}: stride of truncation must be less than max_length, got {truncation['stride']} and "
            f"{truncation['max_length']}"
        )
    return parsed


def _check_templates(path: Path, processor: dict[str, Any]) -> None:
    """Raise if a template has a special token that it does not define, at which the library panics."""
    for each in processor.get("processors", ()):
        _check_templates(path, each)
    if processor["type"] == "TemplateProcessing":
        pieces = [*processor["single"], *processor["pair"]]
        used = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
        if unknown := sorted(used - processor["special_tokens"].keys()):
            raise ValueError(f"{path}: special_tokens of the post-processor has no {short_repr(unknown[0])}")


def _is_ctc_tokenizer(folder: Path) -> bool:
    """Whether the vocabulary of a folder is that of a CTC tokenizer, such as Wav2Vec2's."""
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    model = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return settings.get("tokenizer_class") == "Wav2Vec2CTCTokenizer" or model.get("model_type") == "wav2vec2"


def _ctc_tokenizer(folder: Path) -> Tokenizer:
    """Build a tokenizer whose `decode` takes labels of frames, merges repeats and drops blanks."""
    from tokenizers import Regex, Tokenizer, decoders, models

    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    vocabulary = read_json(folder / VOCABULARY)
    numbers = list(vocabulary.values())
    if not all(type(number) is int and 0 <= number < MAX_INT for number in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"{folder / VOCABULARY} must map letters to distinct numbers; vocabularies per language are not supported"
        )
    blank, delimiter, unknown = (
        _token(folder, settings, name, default)
        for name, default in (("pad_token", "<pad>"), ("word_delimiter_token", "|"), ("unk_token", "<unk>"))
    )
    result = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    ctc = decoders.CTC(pad_token=blank, word_delimiter_token=delimiter, cleanup=False)
    to_space = decoders.Replace(delimiter, " ")
    strip = decoders.Replace(Regex("^ +| +$"), "")
    result.decoder = decoders.Sequence([ctc, to_space, decoders.Fuse(), strip])
    return result


def _token(folder: Path, settings: dict[str, Any], name: str, default: str) -> str:
    """Return a special token of tokenizer_config.json: a string, or the content of an object."""
    token = settings.get(name) or default
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str) or not 0 < len(token) < 100:
        raise ValueError(f"{folder / TOKENIZER_CONFIG}: {name} must be a token, got {short_repr(settings[name])}")
    return token


def attach_tokenizer(model: SentenceEmbedder, folder: Path) -> SentenceEmbedder:
    """Set the tokenizer of an embedder, if its folder has one; return the embedder."""
    if (folder / TOKENIZER).exists():
        model.tokenizer = _with_truncation(tokenizer(folder), folder, model.encoder)
    return model


def _with_truncation(encoder_tokenizer: Tokenizer, folder: Path, encoder: TextEncoder) -> Tokenizer:
    """Disable padding and truncate to the length given in the folder, or to the positions of the model."""
    settings, tokenizer_settings = (
        read_json(folder / file) if (folder / file).exists() else {} for file in (LENGTH, TOKENIZER_CONFIG)
    )
    if settings.get("do_lower_case"):
        raise ValueError(
            f"{folder / LENGTH}: do_lower_case is not supported; add a lowercase normalizer to {TOKENIZER}"
        )
    available = encoder.config.positions - encoder.config.first_position
    for file, name, values in (
        (LENGTH, "max_seq_length", settings),
        (TOKENIZER_CONFIG, "model_max_length", tokenizer_settings),
    ):
        value = values.get(name)  # transformers writes 1e30 for no limit
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1):
            raise ValueError(f"{folder / file}: {name} must be a number of at least 1, got {short_repr(value)}")
    encoder_tokenizer.no_padding()
    encoder_tokenizer.enable_truncation(
        int(min(settings.get("max_seq_length") or tokenizer_settings.get("model_max_length") or available, available))
    )
    return encoder_tokenizer


def save_tokenizer(model: SentenceEmbedder, folder: Path) -> None:
    """Write the tokenizer of an embedder, if it has one, and its maximum length."""
    encoder_tokenizer = model.tokenizer
    if encoder_tokenizer is not None:
        values = (encoder_tokenizer.truncation or {}).get("max_length")
        write_json(folder / LENGTH, {"max_seq_length": values, "do_lower_case": False})
        write_atomically(folder / TOKENIZER, lambda path: encoder_tokenizer.save(str(path)))
