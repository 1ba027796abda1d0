"""Writing a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.models.checkpoints import own_format, sentence_transformers, tokenizers
from regard.models.checkpoints.families import FAMILIES
from regard.models.checkpoints.family import Family
from regard.models.checkpoints.files import CONFIG, GENERATION, float_types, write_json, write_weights
from regard.models.checkpoints.tensor_names import TensorMapping, tensor_mappings
from regard.models.text import SentenceEmbedder


def save(model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int) -> None:
    """See `regard.models.checkpoints.api`."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model must be one of regard.models, with a config, but is {type(model).__name__}")
    if max_shard_size < 1:
        raise ValueError(f"limit must be a number of bytes, at least 1, but is {max_shard_size}")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, SentenceEmbedder):
        tokenizers.save_tokenizer(model, path)
        if sentence_transformers.can_save(model):
            write(model.encoder, path, max_shard_size)
            return sentence_transformers.save(model, path)
    write(model, path, max_shard_size)
    (path / sentence_transformers.MODULES).unlink(missing_ok=True)  # an embedder's, which this is not
    return None


def write(model: nn.Module, path: Path, max_shard_size: int) -> None:
    origin: dict[str, Any] = getattr(model, "origin", {})
    family, name = choose(model, origin)
    if family is None:
        said, rules = own_format.config_values(model), own_format.RULES
    else:
        architecture = family.architectures[name]
        said = _said(family, name, model, origin)
        rules = architecture.rules(model.config)
    if len(types := float_types(model.state_dict().values())) == 1:
        said["dtype"] = types[0]
    write_weights(path, split(model, tensor_mappings(model, rules)), max_shard_size)
    if family is not None and (spoken := family.generation(model.config)):
        padding = {"pad_token_id": said["pad_token_id"]} if said.get("pad_token_id") is not None else {}
        write_json(path / GENERATION, spoken | padding)
    write_json(path / CONFIG, said)


def split(model: nn.Module, planned: list[TensorMapping]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by their names."""
    tensors = model.state_dict()
    for move in planned:
        yield from move.split(tensors[move.ours].detach())


def choose(model: nn.Module, origin: dict[str, Any]) -> tuple[Family | None, str]:
    """The family and the architecture that can say all of a model: the one that it came from before others."""
    named = set(origin.get("architectures") or ())
    fits = [
        (family, name, architecture)
        for family in FAMILIES
        for name, architecture in family.architectures.items()
        if architecture.model is type(model) and architecture.written
    ]
    fits.sort(key=lambda fit: (fit[0].model_type != origin.get("model_type"), fit[1] not in named))
    for family, name, architecture in fits:
        if type(model.config) is family.config and family.why_not(model.config, architecture) is None:
            return family, name
    return None, ""


def _said(family: Family, name: str, model: nn.Module, origin: dict[str, Any]) -> dict[str, Any]:
    """Their configuration: what was said before and means nothing to us, and what we say."""
    kept = dict(origin) if origin.get("model_type") == family.model_type else {}
    for dropped in ("torch_dtype", *family.dropped):
        kept.pop(dropped, None)
    said = family.values_of(model.config)
    for entry in family.fields:  # of several names for one thing, the one that was there
        before = kept.get(entry.theirs)
        if before is not None and entry.read(before) == entry.read(said[entry.theirs]):
            said[entry.theirs] = before
    labels = kept.get("id2label") or {}
    if len(labels) == len(said.get("id2label", ())):  # the classes had names
        said = {key: value for key, value in said.items() if key not in ("id2label", "label2id")}
    return family.absent(model.config) | kept | said | {"model_type": family.model_type, "architectures": [name]}
