"""A tiny random model of an architecture, and inputs that its eager attention accepts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from tools.architectures.shrink import IMAGE, PATCH, shrink

LARGEST = 60_000_000  # parameters
_FIRST = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL",
)


class NotBuiltError(Exception):
    """No tiny model could be built, or no inputs for it."""


def architectures() -> list[str]:
    """The model types for which Transformers has a model class."""
    return sorted(set().union(*_mappings().values()))


def _mappings() -> dict[str, dict[str, Any]]:
    mappings = {
        name.removesuffix("_MAPPING_NAMES"): value
        for name, value in vars(modeling_auto).items()
        if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES")
    }
    first = {name: mappings.pop(name) for name in _FIRST}
    return first | dict(sorted(mappings.items()))


def model_class(model_type: str) -> type[PreTrainedModel]:
    mappings = _mappings()
    if {"text_config", "decoder"} & set(CONFIG_MAPPING[model_type].sub_configs):
        mappings.pop("MODEL_FOR_CAUSAL_LM")  # which may be that of the text alone
    for names in mappings.values():
        if model_type in names:
            name = names[model_type]
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise NotBuiltError("no model class")


def tiny_config(model_type: str) -> Any:
    cls = CONFIG_MAPPING[model_type]
    values = shrink(cls().to_dict(), model_type)
    config = cls.from_dict(values)
    config.pad_token_id = getattr(config, "pad_token_id", 0) or 0
    return config


def build(model_type: str, implementation: str | None) -> PreTrainedModel:
    """The model, with weights large enough for attention to be far from uniform."""
    config, cls = tiny_config(model_type), model_class(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
    if size > LARGEST:
        raise NotBuiltError(f"{size:,} parameters after shrinking")
    torch.manual_seed(0)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = cls._from_config(tiny_config(model_type), **options).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * min(0.15, parameter.shape[-1] ** -0.5)
                )
            elif not parameter.isfinite().all():
                parameter.zero_()
    return model.float()


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Inputs that the model accepts; the first of some candidates with which a forward pass succeeds."""
    errors = []
    for inputs in _candidates(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:  # any error that a model raises on a wrong shape
            errors.append(f"{type(error).__name__}: {error}")
    raise NotBuiltError(errors[0] if errors else f"no inputs for {model.main_input_name!r}")


def _candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    accepted = inspect.signature(model.forward).parameters
    required = [n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    text = {"input_ids": ids(2, 12)} if "input_ids" in accepted else {}
    decoder = {"decoder_input_ids": ids(2, 7)} if "decoder_input_ids" in accepted else {}
    config = model.config
    extra = {
        "bbox": torch.sort(torch.randint(0, 20, (2, 12, 4), generator=_generator()), -1)[0],
        "encoder_hidden_states": _normal(2, 5, _get(config, "encoder_hidden_size", "hidden_size", "d_model") or 32),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
    }
    needed = {name: extra[name] for name in required if name in extra and name not in text}
    needed |= {"bbox": extra["bbox"]} if "bbox" in accepted else {}
    media = list(_media(model, accepted))
    main = model.main_input_name
    for grid in ("grid_thw", "image_grid_thw"):
        if grid in accepted and "input_ids" not in accepted:
            patch, frames = _get(config, "patch_size") or PATCH, _get(config, "temporal_patch_size") or 1
            first = next(iter(accepted))
            for width in (frames, 1):
                flat = {first: _normal(16, channels_of(config) * width * patch * patch)}
                yield flat | {grid: torch.tensor([[1, 4, 4]])}
                yield {first: _normal(16, channels_of(config), patch, patch), grid: torch.tensor([[1, 4, 4]])}
    if text and main == "input_ids":
        yield text | decoder | needed
        yield text | needed
        yield from (text | decoder | needed | one for one in media)
    yield from (one | decoder | needed for one in media)
    yield from (one | needed for one in media)
    yield from (text | decoder | needed | one for one in media)
    if "inputs_embeds" in accepted:
        yield {"inputs_embeds": _normal(2, 12, _get(config, "hidden_size", "d_model", "n_embd") or 32)}
    if "hidden_states" in accepted:
        yield {"hidden_states": _normal(2, 12, _get(config, "hidden_size", "d_model") or 32)} | needed


def _media(model: PreTrainedModel, accepted: Any) -> Iterator[dict[str, Tensor]]:
    config = model.config
    size = _get(config, "image_size", "img_size") or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = channels_of(config)
    if "pixel_values" in accepted:
        yield {"pixel_values": _normal(2, channels, height, width)}
        yield {"pixel_values": _normal(2, channels, 64, 64)}
        yield {"pixel_values": _normal(2, channels, 128, 128)}
        yield {"pixel_values": _normal(2, _get(config, "num_frames") or 4, channels, height, width)}
        yield {"pixel_values": _normal(2, 2, channels, height, width)}
    for name in ("pixel_values_videos", "pixel_values"):
        if name in accepted:
            yield {name: _normal(1, _get(config, "num_frames", "frames_per_clip") or 4, channels, height, width)}
    for name in ("input_features", "input_values", "audio_values", "audio_input", "waveform"):
        if name not in accepted:
            continue
        mels = (
            _get(
                config,
                "num_mel_bins",
                "feature_size",
                "feature_projection_input_dim",
                "input_dim",
                "input_feat_per_channel",
            )
            or 16
        )
        yield {name: _normal(2, mels, 2 * (_get(config, "max_source_positions") or 20))}
        yield {name: _normal(2, 24, mels)}
        yield {name: _normal(2, 4000)}
        yield {name: _normal(2, 1, 4000)}
        yield {name: _normal(2, _get(config, "max_length") or 64, mels)}
        yield {name: _normal(2, 1, 64, mels)}
    for name in ("past_values", "inputs"):
        if name in accepted:
            length = _get(config, "context_length", "seq_length") or 32
            yield {name: _normal(2, length, _get(config, "num_input_channels") or 1)}
            yield {name: _normal(2, length)}
            yield {name: ids(2, 12)}


def channels_of(config: Any) -> int:
    return _get(config, "num_channels", "in_channels", "in_chans") or 3


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(5, 45, (rows, length), generator=_generator())


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator())


def _get(config: Any, *names: str) -> Any:
    for name in names:
        for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
            if (value := getattr(part, name, None)) is not None and not isinstance(value, nn.Module):
                return value
    return None
