"""Loading of checkpoints."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.engines.weight_formats import Quantized
from regard.field_types import short_repr
from regard.models.checkpoints import gguf, own_format, sentence_transformers, tokenizers
from regard.models.checkpoints.families import FAMILIES, family_of
from regard.models.checkpoints.family import COMMON, TENSORS, Architecture, Family, Values, check_types
from regard.models.checkpoints.files import CONFIG, GENERATION, Weights, float_types, read_json, resolve_folder
from regard.models.checkpoints.packed_weights import RoundedWeights
from regard.models.checkpoints.tensor_names import (
    NOTHING,
    Rule,
    TensorMapping,
    Tensors,
    abbreviate,
    locate_tensors,
    tensor_mappings,
)
from regard.models.meta import build_on_meta
from regard.models.text import SentenceEmbedder
from regard.nn.freeze import pack_quantized, packable_names
from regard.printable import printable


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    revision: str | None,
    local_files_only: bool,
    packed: bool,
) -> nn.Module:
    """See `regard.models.checkpoints.api`. packed: pack quantised weights of GGUF files as they are stored."""
    if gguf.is_gguf(folder):
        return read_gguf(Path(folder), dtype, packed=packed)
    path = resolve_folder(folder, revision=revision, local_files_only=local_files_only)
    if (path / sentence_transformers.MODULES).exists():
        return sentence_transformers.load(path, lambda inner: read(inner, dtype=dtype, bare=True))
    model = read(path, dtype=dtype)
    return tokenizers.attach_tokenizer(model, path) if isinstance(model, SentenceEmbedder) else model


def meta_model(path: Path) -> nn.Module:
    """Build the model of a config.json, or of a folder with one, on the meta device, without weights."""
    file = path / CONFIG if path.is_dir() else path
    config_json = read_json(file)
    with _name_file_in_errors(file):
        architecture, config = _parse_config(config_json, _find_family(config_json), (), bare=False)
        return build_on_meta(lambda: architecture.model(config))


def read(path: Path, *, dtype: torch.dtype | None, bare: bool = False) -> nn.Module:
    """Load the model of a folder. bare: use the base model if there is no head, in config.json or among the tensors."""
    config_json = read_json(path / CONFIG)
    weights = Weights(path)
    with _name_file_in_errors(path / CONFIG):
        family = _find_family(config_json)
    generation_json = read_json(path / GENERATION) if family is not None and (path / GENERATION).exists() else {}
    generation_values = _generation_values(path / GENERATION, generation_json, family)
    with _name_file_in_errors(path / CONFIG):
        architecture, config = _parse_config(config_json | generation_values, family, weights.names(), bare)
    with _name_file_in_errors(path):
        model = _load_weights(weights, architecture, config, dtype)
    model.__dict__ |= {"origin": config_json, "generation_origin": generation_json}
    return model.eval()


def read_gguf(path: Path, dtype: torch.dtype | None, *, packed: bool) -> nn.Module:
    """Load the model of a GGUF file, in float32 unless `dtype` is given. packed: pack quantised weights."""
    file = gguf.GgufFile(path)
    with _name_file_in_errors(path):
        weights = gguf.GgufWeights(file)
        family = _find_family(weights.config_json)
        architecture, config = _parse_config(weights.config_json, family, weights.names(), bare=False)
        model = _load_weights(weights, architecture, config, dtype, packed=packed)
    model.__dict__["origin"] = weights.config_json
    return model.eval()


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Convert exceptions raised inside the context to a ValueError that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        message = {KeyError: f"{error} is missing", ValueError: str(error)}.get(type(error))
        message = message or f"the content is not as expected ({type(error).__name__}: {error})"
        raise ValueError(f"{path}: {printable(' '.join(message.split()))[:1000]}") from error


def _find_family(config_json: Values) -> Family | None:
    """Return the family of a config.json, or None if it is in the format of regard."""
    check_types(config_json, COMMON)
    if config_json.get("model_type") == own_format.MODEL_TYPE:
        return None
    for name in ("auto_map", "quantization_config"):
        if config_json.get(name):
            raise ValueError(f"{name} is not supported: models with custom code or quantized weights are not loaded")
    family = family_of(config_json.get("model_type"))
    if family is None:
        given, supported = config_json.get("model_type"), [family.model_type for family in FAMILIES]
        raise ValueError(f"model_type = {short_repr(given)} is not supported{_nearest(given, supported)}")
    return family


def _parse_config(
    config_json: Values, family: Family | None, tensors: Iterable[str], bare: bool
) -> tuple[Architecture, Any]:
    """Return the architecture and our configuration that config.json describes."""
    if family is None:
        return own_format.parse_config(config_json)
    names = config_json.get("architectures") or ([next(iter(family.architectures))] if bare else [])
    architecture = next((family.architectures[name] for name in names if name in family.architectures), None)
    if architecture is None:
        nearest = _nearest(next(iter(names), ""), list(family.architectures))
        raise ValueError(f"architectures = {short_repr(names)} is not supported{nearest}")
    stored = frozenset(tensors)
    config = family.config_of(config_json | {TENSORS: stored})
    if bare and not _stores_head(architecture.rules(config), stored):
        architecture = next(iter(family.architectures.values()))
    return architecture, config


def _stores_head(rules: Iterable[Rule], stored: Iterable[str]) -> bool:
    """Whether a file has tensors outside of the encoder; sentence-transformers leaves them out, but keeps the name."""
    starts = tuple(name for rule in rules if not rule.ours.startswith("encoder.") for name in rule.theirs)
    return any(name.startswith(starts) for name in stored)


def _nearest(name: object, supported: Sequence[str]) -> str:
    """Return the rest of an error message: the supported names, and the one most similar to a name."""
    near = get_close_matches(str(name)[:100], supported, 1, 0.5)
    return f"{f'; the nearest is {near[0]}' if near else ''}; supported: {', '.join(supported)}"


def _generation_values(path: Path, generation_json: Values, family: Family | None) -> Values:
    """Return the values of generation_config.json that are part of our configurations."""
    if family is None:
        return {}
    with _name_file_in_errors(path):
        return family.generation_values(generation_json)


def _load_weights(
    weights: Weights | gguf.GgufWeights,
    architecture: Architecture,
    config: Any,
    dtype: torch.dtype | None,
    *,
    packed: bool = False,
) -> nn.Module:
    model = build_on_meta(lambda: architecture.model(config), tensor_count=len(list(weights.names())))
    mappings = tensor_mappings(model, architecture.rules(config))
    source = RoundedWeights(weights, {name: tuple(t.shape) for name, t in model.state_dict().items()})
    stored_names, unused = locate_tensors(source, mappings, architecture.extras, architecture.prefix, config)
    assign_tensors(model, read_tensors(source, mappings, stored_names, dtype))
    contents: dict[str, Quantized | Tensor] = dict(source.contents)
    if contents and dtype not in (None, torch.float32):
        raise ValueError(f"rounded weights compute in float32, got {dtype=}; load without it")
    if packed and isinstance(weights, gguf.GgufWeights) and dtype in (None, torch.float32):
        contents |= gguf.quantized_weights(weights, mappings, stored_names, packable_names(model))
    if contents:
        pack_quantized(model, contents)
    if dtype is None and len(types := float_types(model.state_dict().values())) > 1:
        raise ValueError(
            f"the tensors have different dtypes, {' and '.join(types)}; choose one, such as dtype=torch.float32"
        )
    if unused:
        warn(
            f"{weights.folder}: {abbreviate(unused)} are not used by {type(model).__name__}; "
            "its outputs do not depend on them"
        )
    return model


def warn(message: str) -> None:
    """Issue a warning at the line that called into this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "regard":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), UserWarning, stacklevel=level)


def read_tensors(
    weights: Tensors, mappings: Iterable[TensorMapping], stored_names: dict[str, str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Read the tensors and return them by our names."""
    tensors = {}
    for mapping in mappings:
        parts = [weights.read(stored_names[name]) if name != NOTHING else None for name in mapping.theirs]
        like = next(part for part in parts if part is not None)
        tensor = mapping.join(
            like.new_zeros(shape) if part is None else part for part, shape in zip(parts, mapping.shapes, strict=True)
        )
        tensors[mapping.ours] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return tensors


def assign_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace the tensors of a model; tied tensors stay tied."""
    new_tensors = {id(old): tensors[name] for name, old in model.state_dict(keep_vars=True).items() if name in tensors}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) in new_tensors:
                if id(old) not in parameters:
                    parameters[id(old)] = nn.Parameter(new_tensors[id(old)], requires_grad=old.requires_grad)
                module._parameters[name] = parameters[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in new_tensors:
                module._buffers[name] = new_tensors[id(buffer)]
    unassigned = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if unassigned:
        raise ValueError(f"{type(model).__name__} has tensors that are not in the checkpoint: {abbreviate(unassigned)}")
