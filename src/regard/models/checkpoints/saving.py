"""Saving of checkpoints."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.engines.packed_linear import PackedWeight
from regard.models.checkpoints import own_format, packed_weights, sentence_transformers, tokenizers
from regard.models.checkpoints.families import FAMILIES
from regard.models.checkpoints.family import Family
from regard.models.checkpoints.files import CONFIG, GENERATION, float_types, write_json, write_weights
from regard.models.checkpoints.tensor_names import TensorMapping, tensor_mappings
from regard.models.text import SentenceEmbedder


def save(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int) -> None:
    """See `regard.models.checkpoints.api`."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model must be one of regard.models, with a config, got {type(model).__name__}")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size must be at least 1 byte, got {max_shard_size}")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, SentenceEmbedder):
        tokenizers.save_tokenizer(model, path)
        if sentence_transformers.can_save(model):
            write(model.encoder, path, max_shard_size)
            return sentence_transformers.save(model, path)
    write(model, path, max_shard_size)
    (path / sentence_transformers.MODULES).unlink(missing_ok=True)  # left from an embedder saved here before
    return None


def write(model: nn.Module, path: Path, max_shard_size: int) -> None:
    origin: dict[str, Any] = getattr(model, "origin", {})
    rounded = packed_weights.rounded_weights(model)
    family, name = (None, "") if rounded else choose(model, origin)
    if family is None:
        config_json, rules = own_format.config_values(model), own_format.RULES
    else:
        architecture = family.architectures[name]
        config_json = _config_values(family, name, model, origin)
        rules = architecture.rules(model.config)
    if len(types := float_types(model.state_dict().values())) == 1:
        config_json["dtype"] = types[0]
    write_weights(path, split(model, tensor_mappings(model, rules), rounded), max_shard_size)
    if family is not None and (generation_json := _generation_json(family, model, origin)):
        padding = {"pad_token_id": config_json["pad_token_id"]} if config_json.get("pad_token_id") is not None else {}
        write_json(path / GENERATION, padding | generation_json)
    write_json(path / CONFIG, config_json)


def split(
    model: nn.Module, mappings: list[TensorMapping], rounded: dict[str, PackedWeight]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a model under the names of the checkpoint.

    Tensors of one name have their rows at different places, and zeros elsewhere.
    """
    left = Counter(name for mapping in mappings for name in mapping.theirs)
    sums: dict[str, Tensor] = {}
    for name, tensor in _split(model, mappings, rounded):
        left[name] -= 1
        if left[name] > 0 or name in sums:
            sums[name] = tensor + sums[name] if name in sums else tensor
            if left[name] > 0:
                continue
        yield name, sums.pop(name, tensor)


def _split(
    model: nn.Module, mappings: list[TensorMapping], rounded: dict[str, PackedWeight]
) -> Iterator[tuple[str, Tensor]]:
    tensors = model.state_dict(keep_vars=True)
    names = {id(weight): name for name, weight in rounded.items()}
    for mapping in mappings:
        tensor = tensors[mapping.ours]
        if id(tensor) in names:
            yield from packed_weights.split(mapping.ours, rounded[names[id(tensor)]])
        else:
            yield from mapping.split(tensor.unpack() if isinstance(tensor, PackedWeight) else tensor.detach())


def choose(model: nn.Module, origin: dict[str, Any]) -> tuple[Family | None, str]:
    """Return the family and architecture that can represent a model, preferring those that it came from."""
    origin_names = set(origin.get("architectures") or ())
    candidates = [
        (family, name, architecture)
        for family in FAMILIES
        for name, architecture in family.architectures.items()
        if architecture.model is type(model) and architecture.written
    ]
    candidates.sort(
        key=lambda candidate: (candidate[0].model_type != origin.get("model_type"), candidate[1] not in origin_names)
    )
    for family, name, architecture in candidates:
        if type(model.config) is family.config and family.why_not(model.config, architecture) is None:
            return family, name
    return None, ""


def _generation_json(family: Family, model: nn.Module, origin: dict[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: our values, plus those of the origin that have no counterpart."""
    same = origin.get("model_type") == family.model_type
    kept = dict(getattr(model, "generation_origin", {})) if same else {}
    for name in family.generation_types:
        kept.pop(name, None)
    return kept | family.generation(model.config)


def _config_values(family: Family, name: str, model: nn.Module, origin: dict[str, Any]) -> dict[str, Any]:
    """Return their configuration: our values, plus those of the origin that have no counterpart."""
    kept = dict(origin) if origin.get("model_type") == family.model_type else {}
    for name_to_drop in ("torch_dtype", *family.dropped, *family.aliases):
        kept.pop(name_to_drop, None)
    config_json = family.values_of(model.config)
    for entry in family.fields:  # of equivalent values, keep the original one
        if entry.theirs in family.generation_types:  # generation_config.json may have replaced it
            continue
        original = kept.get(entry.theirs)
        if original is not None and entry.read(original) == entry.read(config_json[entry.theirs]):
            config_json[entry.theirs] = original
    labels = kept.get("id2label") or {}
    if len(labels) == len(config_json.get("id2label", ())):  # keep the names of the classes
        config_json = {key: value for key, value in config_json.items() if key not in ("id2label", "label2id")}
    return family.absent(model.config) | kept | config_json | {"model_type": family.model_type, "architectures": [name]}
