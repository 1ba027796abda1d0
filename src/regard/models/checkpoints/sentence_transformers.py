"""Folders of sentence-transformers: an encoder of text, its pooling, and what else lies beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.field_types import short_repr
from regard.files import read_json as read_value
from regard.models.checkpoints.files import path_inside, read_json, write_json
from regard.models.checkpoints.tokenizers import attach_tokenizer
from regard.models.text import SentenceEmbedder, TextEncoder

MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
MODES = {"cls": "first", "mean": "mean", "max": "max"}


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
    return attach_tokenizer(embedder, transformer).eval()


def can_save(model: SentenceEmbedder) -> bool:
    """Whether sentence-transformers has its pooling."""
    return model.config.pooling in MODES.values()


def save(model: SentenceEmbedder, folder: Path) -> None:
    """What stands beside the encoder's files."""
    (folder / POOLING).mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}_{'token' if mode == 'cls' else 'tokens'}": model.config.pooling == ours
             for mode, ours in MODES.items()}  # fmt: skip
    write_json(folder / POOLING / "config.json", {"word_embedding_dimension": model.config.d_model} | flags)
    kinds = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] if model.config.unit else [])]
    write_json(
        folder / MODULES,
        [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(kinds)
        ],
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    listed = read_value(folder / MODULES)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"{folder / MODULES} must be a list of modules, but is {short_repr(listed)}")
    entries = [(str(entry.get("type"))[:200].rsplit(".", 1)[-1], entry.get("path")) for entry in listed]
    return [(kind, folder if path == "" else path_inside(folder, path)) for kind, path in entries]


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
