"""Folders of sentence-transformers, and the tokenizers that lie beside models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regard.files import whole
from regard.models.checkpoints.files import CONFIG, folder_of, inside, read_json, write_json
from regard.models.text import SentenceEmbedder, TextEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODULES, POOLING, LENGTH, TOKENIZER = "modules.json", "1_Pooling", "sentence_bert_config.json", "tokenizer.json"
LETTERS = "vocab.json"
TOKENIZER_CONFIG, PROMPTS = "tokenizer_config.json", "config_sentence_transformers.json"
MODES = {"cls": "first", "mean": "mean", "max": "max"}


def tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """See `regard.models.checkpoints.calls`."""
    path = folder_of(folder) / TOKENIZER
    try:
        import tokenizers
    except ImportError:
        raise ImportError("tokenizers are read by tokenizers: pip install 'regard[checkpoints]'") from None
    if not path.exists() and (path.parent / LETTERS).exists() and _listens(path.parent):
        return _letters(path.parent)
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no {TOKENIZER}; in transformers, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one from other files"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is no tokenizer: {error}") from None


def _listens(folder: Path) -> bool:
    """Whether the letters of a folder are those of CTC, as Wav2Vec2's tokenizer has them."""
    said = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    model = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return said.get("tokenizer_class") == "Wav2Vec2CTCTokenizer" or model.get("model_type") == "wav2vec2"


def _letters(folder: Path) -> Tokenizer:
    """A tokenizer whose `decode` spells the labels of frames: repeats once, without blanks."""
    from tokenizers import Regex, Tokenizer, decoders, models

    said = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    known = read_json(folder / LETTERS)
    if not all(isinstance(number, int) for number in known.values()):
        raise ValueError(f"{folder / LETTERS} must number the letters; vocabularies of several languages are not read")
    blank, between = (
        str(name["content"] if isinstance(name, dict) else name)
        for name in (said.get("pad_token") or "<pad>", said.get("word_delimiter_token") or "|")
    )
    made = Tokenizer(models.WordLevel(known, unk_token=str(said.get("unk_token") or "<unk>")))
    ctc = decoders.CTC(pad_token=blank, word_delimiter_token=between, cleanup=False)
    spaces = decoders.Replace(between, " ")
    around = decoders.Replace(Regex("^ +| +$"), "")
    made.decoder = decoders.Sequence([ctc, spaces, decoders.Fuse(), around])
    return made


def load(folder: Path, read: Callable[[Path], nn.Module]) -> SentenceEmbedder:
    """The embedder that modules.json puts together: a transformer, its pooling, and unit length if it says so."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; supported are Transformer, Pooling and Normalize"
        )
    if (folder / PROMPTS).exists() and (prompt := read_json(folder / PROMPTS).get("default_prompt_name")):
        raise ValueError(
            f"{folder / PROMPTS}: default_prompt_name = {prompt!r} is not supported; put it into the texts"
        )
    (_, transformer), (_, pooling), *_ = modules
    encoder = read(transformer)
    if not isinstance(encoder, TextEncoder):
        encoder = getattr(encoder, "encoder", encoder)
    if not isinstance(encoder, TextEncoder):
        raise ValueError(f"{transformer} holds a {type(encoder).__name__}, but an encoder of text is needed")
    config = replace(encoder.config, pooling=_pooling(read_json(pooling / "config.json")), unit=len(kinds) == 3)
    with torch.device("meta"):
        embedder = SentenceEmbedder(config)
    embedder.encoder = encoder
    encoder.config = config
    return with_tokenizer(embedder, transformer).eval()


def said_by(model: SentenceEmbedder) -> bool:
    """Whether sentence-transformers has its pooling."""
    return model.config.pooling in MODES.values()


def save(model: SentenceEmbedder, folder: Path) -> None:
    """What stands beside the encoder's files."""
    (folder / POOLING).mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}_{'token' if mode == 'cls' else 'tokens'}": model.config.pooling == ours
             for mode, ours in MODES.items()}  # fmt: skip
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": model.config.width} | flags)
    kinds = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] if model.config.unit else [])]
    write_json(
        folder / MODULES,
        [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(kinds)
        ],
    )


def save_tokenizer(model: SentenceEmbedder, folder: Path) -> None:
    """The tokenizer of an embedder, if it has one, and where it cuts."""
    kept = model.tokenizer
    if kept is not None:
        most = (kept.truncation or {}).get("max_length")
        write_json(folder / LENGTH, {"max_seq_length": most, "do_lower_case": False})
        whole(folder / TOKENIZER, lambda path: kept.save(str(path)))


def with_tokenizer(model: SentenceEmbedder, folder: Path) -> SentenceEmbedder:
    """The embedder with the tokenizer of its folder, if there is one."""
    if (folder / TOKENIZER).exists():
        model.tokenizer = _cutting(tokenizer(folder), folder, model.encoder)
    return model


def _modules(folder: Path) -> list[tuple[str, Path]]:
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        entries = [(str(entry["type"]).rsplit(".", 1)[-1], entry["path"]) for entry in listed]
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / MODULES} must be a list of modules, each with its type and path: {error}"
        ) from None
    return [(kind, inside(folder, path) if path else folder) for kind, path in entries]


def _pooling(said: dict[str, Any]) -> str:
    if "pooling_mode" in said:
        chosen = [said["pooling_mode"]]
    else:
        flags = [
            name.removeprefix("pooling_mode_") for name, on in said.items() if name.startswith("pooling_mode_") and on
        ]
        chosen = [name.removesuffix("_tokens").removesuffix("_token") for name in flags]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise ValueError(
            f"pooling by {' and '.join(map(str, chosen)) or 'nothing'} is not supported; supported: {', '.join(MODES)}"
        )
    return MODES[chosen[0]]


def _cutting(kept: Tokenizer, folder: Path, encoder: TextEncoder) -> Tokenizer:
    """The tokenizer without filler, and cutting at what the folder says, or the model knows."""
    said, also = (read_json(folder / file) if (folder / file).exists() else {} for file in (LENGTH, TOKENIZER_CONFIG))
    if said.get("do_lower_case"):
        raise ValueError(f"{folder / LENGTH}: do_lower_case is not supported; put it into {TOKENIZER}")
    known = encoder.config.positions - encoder.config.first_position
    kept.no_padding()
    kept.enable_truncation(int(min(said.get("max_seq_length") or also.get("model_max_length") or known, known)))
    return kept
