"""Reading a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.checkpoints import own, sentences
from regard.models.checkpoints.families import FAMILIES, family_of
from regard.models.checkpoints.family import Architecture, Family
from regard.models.checkpoints.files import CONFIG, GENERATION, Weights, float_type, folder_of, read_json
from regard.models.checkpoints.names import Move, find, moves, some


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> nn.Module:
    """The model of a folder with config.json and safetensors, or of a name on the Hub such as "org/name"; in eval mode.

    What it is, the checkpoint's `architectures` says: BERT, RoBERTa, DistilBERT and ALBERT with their heads, GPT-2,
    Llama, Mistral, Qwen2, Gemma 2, T5, Marian, ViT, DETR, a folder of sentence-transformers, or what `regard.save`
    wrote. Weights keep their type unless `dtype` is given. Only safetensors are opened. A tensor that is missing,
    unknown or of another shape, and a configuration that our models cannot follow, is an error.

    revision: a branch, tag or commit on the Hub. local_files_only: look only at what was fetched before.

    >>> import regard as rg, tempfile
    >>> config = rg.models.LanguageConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.save(rg.models.LanguageModel(config), folder)
    ...     rg.load(folder).config == config
    True
    """
    path = folder_of(folder, revision=revision, local_files_only=local_files_only)
    if (path / sentences.MODULES).exists():
        return sentences.load(path, lambda inner: read(inner, dtype=dtype, bare=True))
    return read(path, dtype=dtype)


def read(path: Path, *, dtype: torch.dtype | None = None, bare: bool = False) -> nn.Module:
    """The model of a folder; `bare` is the base model where the checkpoint does not say an architecture."""
    said = read_json(path / CONFIG)
    if said.get("model_type") == own.MODEL_TYPE:
        model_type, config = own.config_of(said)
        return _filled(path, model_type, config, said, dtype)
    for name in ("auto_map", "quantization_config"):
        if said.get(name):
            raise ValueError(
                f"{path / CONFIG} has {name}: models with code or number formats of their own are not read"
            )
    family, architecture = _choose(path, said, bare)
    try:
        config = family.config_of(said | _spoken(path))
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path / CONFIG}: {what}") from error
    return _filled(path, architecture.model, config, said, dtype, family, architecture)


def _spoken(path: Path) -> dict[str, Any]:
    """What generation_config.json says beyond config.json that is part of our configurations."""
    said = read_json(path / GENERATION) if (path / GENERATION).exists() else {}
    names = ("decoder_start_token_id", "eos_token_id", "bad_words_ids")
    return {name: said[name] for name in names if said.get(name) is not None}


def _choose(path: Path, said: dict[str, Any], bare: bool) -> tuple[Family, Architecture]:
    family = family_of(said.get("model_type"))
    if family is None:
        listed = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(
            f"{path / CONFIG}: model_type = {said.get('model_type')!r} is not supported; supported: {listed}"
        )
    names = said.get("architectures") or ([next(iter(family.architectures))] if bare else [])
    known = next((family.architectures[name] for name in names if name in family.architectures), None)
    if known is None:
        listed = ", ".join(family.architectures)
        raise ValueError(f"{path / CONFIG}: architectures = {names} is not supported; supported: {listed}")
    return family, known


def _filled(
    path: Path,
    model_type: type[nn.Module],
    config: Any,
    said: dict[str, Any],
    dtype: torch.dtype | None,
    family: Family | None = None,
    architecture: Architecture | None = None,
) -> nn.Module:
    with torch.device("meta"):  # shapes alone: every tensor comes from the file
        model = model_type(config)
    weights = Weights(path)
    try:
        if architecture is None:
            wanted = moves(model, own.rules(model))
            found = find(weights, wanted, own.EXTRAS, "")
        else:
            wanted = moves(model, architecture.rules(config))
            found = find(weights, wanted, architecture.extras, architecture.prefix)
        fill(model, read_moves(weights, wanted, found, dtype))
        if dtype is None:
            float_type(model.state_dict().values())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model.__dict__["origin"] = said
    return model.eval()


def read_moves(
    weights: Weights, wanted: Iterable[Move], found: dict[str, str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Our tensors by our names."""
    made = {}
    for move in wanted:
        tensor = move.join(weights.read(found[name]) for name in move.theirs)
        made[move.ours] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return made


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model these tensors in place of its own; those that are tied stay tied."""
    given = {id(old): tensors[name] for name, old in model.state_dict(keep_vars=True).items() if name in tensors}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) in given:
                if id(old) not in parameters:
                    parameters[id(old)] = nn.Parameter(given[id(old)], requires_grad=old.requires_grad)
                module._parameters[name] = parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in given:
                module._buffers[name] = given[id(buffer)]
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(f"{type(model).__name__} has tensors that no checkpoint gives: {some(left)}")
