"""Folders in the format of sentence-transformers: a text encoder, its pooling and its tokenizer."""

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
    """Load the embedder that modules.json describes: a transformer, its pooling, and optional normalisation."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ValueError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}; supported are Transformer, Pooling and Normalize"
        )
    if (folder / PROMPTS).exists() and (prompt := read_json(folder / PROMPTS).get("default_prompt_name")):
        raise ValueError(
            f"{folder / PROMPTS}: default_prompt_name = {prompt!r} is not supported; prepend the prompt to the texts"
        )
    (_, transformer), (_, pooling), *_ = modules
    encoder = read(transformer)
    if not isinstance(encoder, TextEncoder):
        encoder = getattr(encoder, "encoder", encoder)
    if not isinstance(encoder, TextEncoder):
        raise ValueError(f"{transformer} contains a {type(encoder).__name__}, but a text encoder is needed")
    config = replace(encoder.config, pooling=_pooling(read_json(pooling / "config.json")), unit=len(kinds) == 3)
    with torch.device("meta"):
        embedder = SentenceEmbedder(config)
    embedder.encoder = encoder
    encoder.config = config
    return attach_tokenizer(embedder, transformer).eval()


def can_save(model: SentenceEmbedder) -> bool:
    """Whether sentence-transformers supports the pooling of the model."""
    return model.config.pooling in MODES.values()


def save(model: SentenceEmbedder, folder: Path) -> None:
    """Write the files of the pooling and modules.json; those of the encoder are written separately."""
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
    entries_json = read_value(folder / MODULES)
    if not isinstance(entries_json, list) or not all(isinstance(entry, dict) for entry in entries_json):
        raise ValueError(f"{folder / MODULES} must contain a list of modules, got {short_repr(entries_json)}")
    entries = [(str(entry.get("type"))[:200].rsplit(".", 1)[-1], entry.get("path")) for entry in entries_json]
    return [(kind, folder if path == "" else path_inside(folder, path)) for kind, path in entries]


def _pooling(config_json: dict[str, Any]) -> str:
    if "pooling_mode" in config_json:
        chosen = [config_json["pooling_mode"]]
    else:
        flags = [
            name.removeprefix("pooling_mode_")
            for name, enabled in config_json.items()
            if name.startswith("pooling_mode_") and enabled
        ]
        chosen = [name.removesuffix("_tokens").removesuffix("_token") for name in flags]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise ValueError(
            f"pooling by {' and '.join(map(str, chosen)) or 'nothing'} is not supported; supported: {', '.join(MODES)}"
        )
    return MODES[chosen[0]]
