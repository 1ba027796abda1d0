"""Reading a checkpoint."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.field_types import short_repr
from regard.models.checkpoints import own_format, sentence_transformers, tokenizers
from regard.models.checkpoints.families import FAMILIES, family_of
from regard.models.checkpoints.family import TENSORS, Architecture, Values, check_types
from regard.models.checkpoints.files import CONFIG, GENERATION, Weights, float_types, read_json, resolve_folder
from regard.models.checkpoints.tensor_names import NOTHING, TensorMapping, abbreviate, locate_tensors, tensor_mappings
from regard.models.meta import build_on_meta as meta
from regard.models.text import SentenceEmbedder
from regard.printable import printable


def load(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None, revision: str | None, local_files_only: bool
) -> nn.Module:
    """See `regard.models.checkpoints.api`."""
    path = resolve_folder(folder, revision=revision, local_files_only=local_files_only)
    if (path / sentence_transformers.MODULES).exists():
        return sentence_transformers.load(path, lambda inner: read(inner, dtype=dtype, bare=True))
    model = read(path, dtype=dtype)
    return tokenizers.attach_tokenizer(model, path) if isinstance(model, SentenceEmbedder) else model


def meta_model(path: Path) -> nn.Module:
    """The model that a config.json describes, or a folder with one, without its weights: on the device "meta"."""
    file = path / CONFIG if path.is_dir() else path
    said = read_json(file)
    with _name_file_in_errors(file):
        architecture, config = _parse_config(said, {}, (), bare=False)
        return meta(lambda: architecture.model(config))


def read(path: Path, *, dtype: torch.dtype | None, bare: bool = False) -> nn.Module:
    """The model of a folder; `bare` is the base model where the checkpoint does not say an architecture."""
    said = read_json(path / CONFIG)
    weights = Weights(path)
    with _name_file_in_errors(path / CONFIG):
        architecture, config = _parse_config(said, _generation_config(path), weights.names(), bare)
    with _name_file_in_errors(path):
        model = _load_weights(weights, architecture, config, dtype)
    model.__dict__["origin"] = said
    return model.eval()


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Within, what a file makes our code raise, of any kind, is one error that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        what = {KeyError: f"{error} is missing", ValueError: str(error)}.get(type(error))
        words = what or f"it is not what is expected there ({type(error).__name__}: {error})"
        raise ValueError(f"{path}: {printable(' '.join(words.split()))[:1000]}") from error


def _parse_config(said: Values, spoken: Values, tensors: Iterable[str], bare: bool) -> tuple[Architecture, Any]:
    """The architecture and our configuration that config.json describes."""
    check_types(said)
    if said.get("model_type") == own_format.MODEL_TYPE:
        return own_format.parse_config(said)
    for name in ("auto_map", "quantization_config"):
        if said.get(name):
            raise ValueError(f"it has {name}: models with code or number formats of their own are not read")
    family = family_of(said.get("model_type"))
    if family is None:
        listed = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(f"model_type = {short_repr(said.get('model_type'))} is not supported; supported: {listed}")
    names = said.get("architectures") or ([next(iter(family.architectures))] if bare else [])
    architecture = next((family.architectures[name] for name in names if name in family.architectures), None)
    if architecture is None:
        listed = ", ".join(family.architectures)
        raise ValueError(f"architectures = {short_repr(names)} is not supported; supported: {listed}")
    return architecture, family.config_of(said | spoken | {TENSORS: frozenset(tensors)})


def _generation_config(path: Path) -> dict[str, Any]:
    """What generation_config.json says beyond config.json that is part of our configurations."""
    said = read_json(path / GENERATION) if (path / GENERATION).exists() else {}
    names = (
        "decoder_start_token_id", "eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
        "forced_decoder_ids", "lang_to_id", "task_to_id", "no_timestamps_token_id", "max_initial_timestamp_index",
    )  # fmt: skip
    with _name_file_in_errors(path / GENERATION):
        check_types(said)
    return {name: said[name] for name in names if said.get(name) is not None}


def _load_weights(weights: Weights, architecture: Architecture, config: Any, dtype: torch.dtype | None) -> nn.Module:
    # all tensors come from the file
    model = meta(lambda: architecture.model(config), tensor_count=len(list(weights.names())))
    wanted = tensor_mappings(model, architecture.rules(config))
    found, unused = locate_tensors(weights, wanted, architecture.extras, architecture.prefix, config)
    assign_tensors(model, read_tensors(weights, wanted, found, dtype))
    if dtype is None and len(types := float_types(model.state_dict().values())) > 1:
        raise ValueError(
            f"the tensors are of {' and '.join(types)}; give the one that you want, as dtype=torch.float32"
        )
    if unused:
        warn(
            f"{weights.folder}: {abbreviate(unused)} are not used, since {type(model).__name__} has no such part; "
            "its outputs do not depend on them"
        )
    return model


def warn(message: str) -> None:
    """A warning at the line that called into this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "regard":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), UserWarning, stacklevel=level)


def read_tensors(
    weights: Weights, wanted: Iterable[TensorMapping], found: dict[str, str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Our tensors by our names."""
    made = {}
    for move in wanted:
        parts = [weights.read(found[name]) if name != NOTHING else None for name in move.theirs]
        like = next(part for part in parts if part is not None)
        tensor = move.join(
            like.new_zeros(shape) if part is None else part for part, shape in zip(parts, move.shapes, strict=True)
        )
        made[move.ours] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return made


def assign_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
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
        raise ValueError(f"{type(model).__name__} has tensors that no checkpoint gives: {abbreviate(left)}")
