"""Public functions. Their dependencies are imported in the first call, to keep `import regard` fast."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from regard.engines.packed_linear import check_format
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
    weights: str | None = None,
) -> nn.Module:
    """Load a model, in eval mode, from a folder with config.json and safetensors, a GGUF file or the Hub ("org/name").

    Supported checkpoints (docs/how-to/hugging_face.md lists the classes that they load as):

    - text: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ALBERT, DeBERTa-v2 and v3, MPNet, ModernBERT, with their heads, and
      folders of sentence-transformers
    - language: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), gpt-oss, SmolLM3, OLMo 2, Phi-3,
      StarCoder2, DeepSeek-V2, DeepSeek-V3, Qwen3-Next
    - translation: T5, mT5, Marian, BART, mBART, M2M100 and NLLB
    - vision: ViT, DINOv2, DETR; with text: CLIP, SigLIP
    - speech: Whisper, Wav2Vec2 with CTC
    - models written by `regard.save`
    - GGUF files of Llama, Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2 and Gemma 2, dequantised to float32

    Weights keep their dtype unless `dtype` is given. Only safetensors and GGUF files are read. Missing or unknown
    tensors, wrong shapes and unsupported configurations raise. Unused weights, such as BERT's pooler, are listed in a
    warning.

    revision: a branch, tag or commit on the Hub. local_files_only: use only files that have been downloaded before.
    frozen: pack the weights for inference with `regard.nn.freeze`; call it again to get the weights it did not pack.
    weights: also pack them, in this format: "float32", "bfloat16", "int8" or "int4". The model computes in float32.
        A model that was saved with rounded weights is loaded with them. Weights of GGUF files of the types Q8_0, Q4_0
        and Q4_1 are packed as they are stored, with `frozen` or if `weights` is their format, int8 or int4; some CPUs
        then also round the inputs of their products (docs/how-to/freeze.md), which `weights="float32"` avoids.

    >>> import regard as rg, tempfile
    >>> config = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.save(rg.models.LanguageModel(config), folder)
    ...     rg.load(folder).config == config
    True
    """
    from regard.models.checkpoints import loading

    if weights is not None:
        dtype = torch.float32 if dtype is None else dtype
        if check_format(weights) and dtype != torch.float32:
            raise ValueError(f"a model with packed weights computes in float32, got dtype={dtype} and {weights=}")
    as_stored = frozen if weights is None else weights in ("int8", "int4")
    model = loading.load(folder, dtype=dtype, revision=revision, local_files_only=local_files_only, packed=as_stored)
    if frozen or weights is not None:
        freeze(model, weights=weights)
    return model


def save(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000) -> None:
    """Save a model as config.json and safetensors in shards of at most `max_shard_size` bytes, for `regard.load`.

    If its configuration has a counterpart in Hugging Face's libraries, they can read the folder too: it is written in
    the format of the checkpoint that the model came from, or of the first family that can represent it. Other models,
    such as the original Transformer, and models frozen with rounded weights are written in regard's own format, the
    rounded weights as they are (docs/how-to/freeze.md). Every file is written atomically.

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
    """Load the tokenizer of a folder, a GGUF file or a name on the Hub: `tokenizer(folder).encode("words").ids`.

    For Wav2Vec2, `decode` takes the best label of every frame and applies the CTC rules.

    >>> import regard as rg
    >>> rg.models.tokenizer("no/folder/of/mine")
    Traceback (most recent call last):
    FileNotFoundError: no/folder/of/mine is not a folder; ...
    """
    from regard.models.checkpoints import tokenizers

    return tokenizers.tokenizer(folder)
