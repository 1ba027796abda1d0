"""The calls. What they need is imported at the first one: most programs that import regard never make one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from regard.nn.freeze import freeze

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    frozen: bool = False,
) -> nn.Module:
    """The model of a folder with config.json and safetensors, or of a name on the Hub such as "org/name"; in eval mode.

    What it is, the checkpoint's `architectures` says: BERT, RoBERTa, DistilBERT and ALBERT with their heads, GPT-2,
    Llama, Mistral, Qwen2, Gemma 2, T5, Marian, ViT, DETR, Whisper, Wav2Vec2 with CTC, a folder of
    sentence-transformers, or what `regard.save` wrote. Weights keep their type unless `dtype` is given. Only
    safetensors are opened. A tensor that is missing, unknown or of another shape, and a configuration that our models
    cannot follow, is an error. Weights of parts that our models do not have, such as BERT's pooler, are listed in a
    warning.

    revision: a branch, tag or commit on the Hub. local_files_only: look only at what was fetched before.
    frozen: pack the weights for inference by `regard.nn.freeze`, which says when called again what it did not pack.

    >>> import regard as rg, tempfile
    >>> config = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.save(rg.models.LanguageModel(config), folder)
    ...     rg.load(folder).config == config
    True
    """
    from regard.models.checkpoints import loading

    model = loading.load(folder, dtype=dtype, revision=revision, local_files_only=local_files_only)
    if frozen:
        freeze(model)
    return model


def save(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000) -> None:
    """Write a model as config.json and safetensors, in shards of at most `max_shard_size` bytes; `regard.load` reads it
    back.

    Where its configuration has a counterpart there, Hugging Face's libraries read it as well, under the names of the
    checkpoint that it came from, or of the first family that can say all of it. Other models, such as the classic
    Transformer, are written under our own names. Every file is written whole or not at all.

    >>> import regard as rg, json, pathlib, tempfile
    >>> config = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.save(rg.models.LanguageModel(config), folder)
    ...     json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"]
    ['GPT2LMHeadModel']
    """
    from regard.models.checkpoints import saving

    saving.save(model, folder, max_shard_size=max_shard_size)


def tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder, or of a name on the Hub: `tokenizer(folder).encode("words").ids`.

    That of Wav2Vec2 spells: its `decode` takes the best label of every frame.

    >>> import regard as rg
    >>> rg.models.tokenizer("no/folder/of/mine")
    Traceback (most recent call last):
    FileNotFoundError: no/folder/of/mine is no folder; ...
    """
    from regard.models.checkpoints import tokenizers

    return tokenizers.tokenizer(folder)
