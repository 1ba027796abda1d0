"""The tokenizers that lie beside models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.field_types import MAX_INT, short_repr
from regard.files import read_text, write_atomically
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
    """The tokenizer of a tokenizer.json; one that would pad texts to absurd lengths is an error."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError("tokenizers are read by tokenizers: pip install 'regard[checkpoints]'") from None
    text = read_text(path)
    try:
        found = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # what the library raises of a panic is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{path} is no tokenizer: {printable(first_line(error))[:300]}") from None
    padding, cut = found.padding or {}, found.truncation or {}
    for name in ("length", "pad_to_multiple_of"):
        if (padding.get(name) or 0) > LONGEST:
            raise ValueError(f"{path}: {name} of padding must be at most {LONGEST}, but is {padding[name]}")
    if cut and not 0 <= cut["stride"] < cut["max_length"]:
        raise ValueError(
            f"{path}: stride of truncation must be less than max_length, but they are {cut['stride']} and "
            f"{cut['max_length']}"
        )
    return found


def _is_ctc_tokenizer(folder: Path) -> bool:
    """Whether the letters of a folder are those of CTC, as Wav2Vec2's tokenizer has them."""
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    model = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return settings.get("tokenizer_class") == "Wav2Vec2CTCTokenizer" or model.get("model_type") == "wav2vec2"


def _ctc_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer whose `decode` spells the labels of frames: repeats once, without blanks."""
    from tokenizers import Regex, Tokenizer, decoders, models

    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    known = read_json(folder / VOCABULARY)
    numbers = list(known.values())
    if not all(type(number) is int and 0 <= number < MAX_INT for number in numbers) or len({*numbers}) < len(numbers):
        raise ValueError(
            f"{folder / VOCABULARY} must number the letters; vocabularies of several languages are not read"
        )
    blank, between, unknown = (
        _token(folder, settings, name, default)
        for name, default in (("pad_token", "<pad>"), ("word_delimiter_token", "|"), ("unk_token", "<unk>"))
    )
    made = Tokenizer(models.WordLevel(known, unk_token=unknown))
    ctc = decoders.CTC(pad_token=blank, word_delimiter_token=between, cleanup=False)
    spaces = decoders.Replace(between, " ")
    around = decoders.Replace(Regex("^ +| +$"), "")
    made.decoder = decoders.Sequence([ctc, spaces, decoders.Fuse(), around])
    return made


def _token(folder: Path, settings: dict[str, Any], name: str, default: str) -> str:
    """A special token of tokenizer_config.json: a text, or an object that holds one."""
    found = settings.get(name) or default
    found = found.get("content") if isinstance(found, dict) else found
    if not isinstance(found, str) or not 0 < len(found) < 100:
        raise ValueError(f"{folder / TOKENIZER_CONFIG}: {name} must be a token, but is {short_repr(settings[name])}")
    return found


def attach_tokenizer(model: SentenceEmbedder, folder: Path) -> SentenceEmbedder:
    """The embedder with the tokenizer of its folder, if there is one."""
    if (folder / TOKENIZER).exists():
        model.tokenizer = _with_truncation(tokenizer(folder), folder, model.encoder)
    return model


def _with_truncation(kept: Tokenizer, folder: Path, encoder: TextEncoder) -> Tokenizer:
    """The tokenizer without filler, and cutting at what the folder says, or the model knows."""
    settings, also = (
        read_json(folder / file) if (folder / file).exists() else {} for file in (LENGTH, TOKENIZER_CONFIG)
    )
    if settings.get("do_lower_case"):
        raise ValueError(f"{folder / LENGTH}: do_lower_case is not supported; put it into {TOKENIZER}")
    known = encoder.config.positions - encoder.config.first_position
    for file, name, most in ((LENGTH, "max_seq_length", settings), (TOKENIZER_CONFIG, "model_max_length", also)):
        value = most.get(name)  # transformers writes 1e30 where there is no limit
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1):
            raise ValueError(f"{folder / file}: {name} must be a number of at least 1, but is {short_repr(value)}")
    kept.no_padding()
    kept.enable_truncation(int(min(settings.get("max_seq_length") or also.get("model_max_length") or known, known)))
    return kept


def save_tokenizer(model: SentenceEmbedder, folder: Path) -> None:
    """The tokenizer of an embedder, if it has one, and where it cuts."""
    kept = model.tokenizer
    if kept is not None:
        most = (kept.truncation or {}).get("max_length")
        write_json(folder / LENGTH, {"max_seq_length": most, "do_lower_case": False})
        write_atomically(folder / TOKENIZER, lambda path: kept.save(str(path)))
