"""Families: bidirectional tables between a kind of checkpoint and the models of regard.

"Theirs" is the configuration and the tensors of the checkpoint, "ours" those of regard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from regard.field_types import check_value, hints, short_repr
from regard.models.checkpoints.tensor_names import Extras, Rule, table

Values = dict[str, Any]
TENSORS = "tensors of the checkpoint"  # key of the tensor names among the configuration values
REQUIRED, NO_EXTRAS = object(), Extras()


def identity(value: Any) -> Any:
    return value


SIDES = int | list[int]
TYPES: dict[str, Any] = {
    "architectures": list[str], "model_type": str, "id2label": dict[str, Any], "num_labels": int,
    "rope_parameters": dict[str, float | str | bool | None], "rope_scaling": dict[str, float | str | bool | None],
    "rope_theta": float, "partial_rotary_factor": float, "layer_types": list[str], "sliding_window": int,
    "max_window_layers": int, "use_sliding_window": bool, "attention_bias": bool, "mlp_bias": bool,
    "attn_logit_softcapping": float, "final_logit_softcapping": float, "query_pre_attn_scalar": float,
    "scale_embedding": bool, "share_encoder_decoder_embeddings": bool, "decoder_vocab_size": int,
    "scale_decoder_outputs": bool, "feed_forward_proj": str, "tie_word_embeddings": bool, "n_inner": int,
    "decoder_start_token_id": int, "pad_token_id": int, "eos_token_id": SIDES, "bad_words_ids": list[list[int]],
    "suppress_tokens": list[int], "begin_suppress_tokens": list[int], "forced_decoder_ids": list[list[int | None]],
    "lang_to_id": dict[str, int], "task_to_id": dict[str, int], "no_timestamps_token_id": int,
    "max_initial_timestamp_index": int, "image_size": SIDES, "patch_size": SIDES, "conv_dim": list[int],
    "conv_kernel": list[int], "conv_stride": list[int], "backbone": str, "use_timm_backbone": bool,
    "backbone_config": dict[str, Any], "is_decoder": bool, "add_cross_attention": bool, "dilation": bool,
    "do_stable_layer_norm": bool, "conv_bias": bool, "qkv_bias": bool, "add_adapter": bool, "normalize_before": bool,
    "normalize_embedding": bool, "add_final_layer_norm": bool, "static_position_embeddings": bool,
    "add_bias_logits": bool, "scale_attn_weights": bool, "scale_attn_by_inverse_layer_idx": bool,
    "use_bidirectional_attention": bool,
}  # fmt: skip
"""Types of values in config.json and generation_config.json that are not in `Family.fields`; null is allowed."""

BACKBONE: dict[str, Any] = {
    "model_type": str, "hidden_act": str, "layer_type": str, "embedding_size": int, "num_channels": int,
    "hidden_sizes": list[int], "depths": list[int], "out_features": list[str], "backbone": str,
    "downsample_in_first_stage": bool, "downsample_in_bottleneck": bool,
}  # fmt: skip
"""Types of the values in backbone_config."""


def check_types(theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if a configuration value has the wrong type."""
    inner = theirs.get("backbone_config")
    for types, values, before in ((TYPES, theirs, ""), (BACKBONE, inner or {}, "backbone_config.")):
        for name, expected in types.items() if isinstance(values, dict) else ():
            check_value(before + name, values.get(name), expected | None)


@dataclass(frozen=True)
class Field:
    """One configuration value: our name, their name, and the default if it is absent or null."""

    ours: str
    theirs: str
    default: Any = REQUIRED
    read: Callable[[Any], Any] = identity
    write: Callable[[Any], Any] = identity


def mapped_field(ours: str, theirs: str, default: Any, names: Mapping[Any, Any]) -> Field:
    """A field with other values in theirs, {theirs: ours}; if several map to one of ours, the first is written."""
    back = {own: other for other, own in reversed(list(names.items()))}

    def read(value: Any) -> Any:
        if not _hashable(value) or value not in names:
            supported = ", ".join(map(repr, names))
            raise ValueError(f"{theirs} = {short_repr(value)} is not supported; supported are {supported}")
        return names[value]

    def write(value: Any) -> Any:
        if value not in back:
            raise ValueError(f"{ours} = {value!r} has no counterpart in {theirs}")
        return back[value]

    return Field(ours, theirs, default, read, write)


def _hashable(value: Any) -> bool:
    return not isinstance(value, (list, dict))


def activation(ours: str, theirs: str, default: str) -> Field:
    """A field for an activation."""
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
             "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"}  # fmt: skip
    return mapped_field(ours, theirs, default, names)


@dataclass(frozen=True)
class Architecture:
    """One entry of `architectures`: our class and the table of its tensor names.

    rules: returns the table for a configuration of ours. prefix: of the base model's tensor names in a checkpoint with
        a head.
    unused: fields of the configuration that the class does not use and that a checkpoint may leave out.
    written: whether models are saved under this name; False if that would need tensors that our class does not have.
    """

    model: type[nn.Module]
    rules: Callable[[Any], tuple[Rule, ...]]
    extras: Extras = NO_EXTRAS
    prefix: str = ""
    unused: tuple[str, ...] = ()
    written: bool = True


def rule_table(text: str, *, ours: str = "", theirs: str = "", head: str = "") -> Callable[[Any], tuple[Rule, ...]]:
    """Return a function that parses a table, and that of a head, on demand; it ignores the configuration."""
    return lambda _: table(text, ours=ours, theirs=theirs) + table(head)


def no_values(_: Any) -> Values:
    return {}


@dataclass(frozen=True)
class Family:
    """One model_type.

    fields: values with a one-to-one counterpart. fixed: values of ours that are constant in the family.
    only: supported values of theirs without counterpart; other values raise, null and absent are accepted.
    read, write: compute the values that depend on several values of the other side.
    dropped: names of theirs that are not kept on saving, because `write` may set another name for the same thing.
    generation: values for generation_config.json. absent: values for names without counterpart, used if the checkpoint
        that a model came from does not have them.
    """

    model_type: str
    config: type
    architectures: Mapping[str, Architecture]
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Values], Values] = no_values
    write: Callable[[Any], Values] = no_values
    dropped: tuple[str, ...] = ()
    generation: Callable[[Any], Values] = no_values
    absent: Callable[[Any], Values] = no_values

    def config_of(self, theirs: Values) -> Any:
        """Convert their configuration to ours; raise if something is not supported."""
        check_types(theirs)
        for name, allowed in self.only.items():
            value = theirs.get(name)
            if value is not None and value not in allowed:
                raise ValueError(
                    f"{name} = {short_repr(value)} is not supported for {self.model_type}; supported is "
                    f"{' or '.join(map(repr, allowed))}"
                )
        values = dict(self.fixed)
        for entry in self.fields:
            value = theirs.get(entry.theirs)
            value = entry.default if value is None else value
            if value is REQUIRED:
                raise ValueError(f"config.json must contain {entry.theirs}")
            try:
                values[entry.ours] = entry.read(value)
            except (TypeError, ArithmeticError) as error:
                raise ValueError(f"{entry.theirs} = {short_repr(value)} is not supported: {error}") from error
            check_size(entry.theirs, entry.ours, values[entry.ours], hints(self.config)[entry.ours])
        config = self.config(**(values | self.read(theirs)))
        check_config(config, {entry.ours: entry.theirs for entry in self.fields})
        return canonical(config)

    def values_of(self, config: Any) -> Values:
        """Convert our configuration to theirs."""
        values = {entry.theirs: entry.write(effective_value(config, entry.ours)) for entry in self.fields}
        return values | self.write(config)

    def why_not(self, config: Any, architecture: Architecture) -> str | None:
        """Return why a configuration does not survive the round trip through theirs, or None if it does."""
        try:
            back = self.config_of(self.values_of(config) | self.generation(config))
        except ValueError as error:
            return str(error)
        for entry in dataclasses.fields(config):
            before, after = effective_value(config, entry.name), effective_value(back, entry.name)
            if before != after and entry.name not in architecture.unused:
                return f"{entry.name} = {before!r} would be read back as {after!r}"
        return None


MAY_BE_ZERO = frozenset(
    {
        "start",
        "stop",
        "suppress_tokens",
        "begin_suppress_tokens",
        "prompt",
        "languages",
        "tasks",
        "no_timestamps",
        "max_first_timestamp",
        "first_position",
        "segments",
        "window",
        "before",
        "after",
        "halvings",
        "narrow",
        "layers",
        "decoder_layers",
    }
)
"""Integer fields that may be 0: token ids, and optional counts."""

TOKENS = ("start", "stop", "suppress_tokens", "begin_suppress_tokens", "prompt", "no_timestamps")
MAX_LAYERS = 10_000
"""Limit per stack, checked before a model is built; the number of tensors limits it again later."""


def check_config(config: Any, names: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless all values of a configuration of ours, including nested ones, are valid.

    names: names of the fields in the file, where they differ.
    """
    values = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    kind: type = type(config)
    for name, value in values.items():
        check_size((names or {}).get(name, name), name, value, hints(kind)[name])
        if dataclasses.is_dataclass(value):
            check_config(value)
    words = values.get("target_vocabulary") or values.get("vocabulary")
    for name in TOKENS:
        for token in _numbers(values.get(name)):
            if words is not None and token >= words:
                shown = (names or {}).get(name, name)
                raise ValueError(f"{shown} must be below the vocabulary size {words}, got {token}")
    d_model, heads = values.get("d_model"), values.get("heads")
    if d_model and heads and values.get("d_head") is None and d_model % heads:
        d_model_name, heads_name = ((names or {}).get(name, name) for name in ("d_model", "heads"))
        raise ValueError(f"{d_model_name} must be a multiple of {heads_name}, got {d_model} and {heads}")
    for name in ("dropout", "attention_dropout", "squeeze"):
        if not 0 <= (values.get(name) or 0) < 1:
            raise ValueError(f"{(names or {}).get(name, name)} must be in [0, 1), got {values[name]}")
    if values.get("base") is not None and values["base"] <= 0:
        raise ValueError(f"the base of the rotary embedding must be positive, got {values['base']}")


def check_size(shown: str, name: str, value: Any, expected: Any) -> None:
    """Raise ValueError unless a value has the type and range of field `name`; `shown` is its name in the file."""
    check_value(shown, value, expected)
    lowest = 0 if name in MAY_BE_ZERO else 1
    for number in _numbers(value):
        if number < lowest:
            raise ValueError(f"{shown} must be at least {lowest}, got {short_repr(value)}")
        if number > MAX_LAYERS and name in ("layers", "decoder_layers", "distinct", "depths"):
            raise ValueError(f"{shown} must be at most {MAX_LAYERS}, got {short_repr(value)}")


def _numbers(value: Any) -> Iterator[int]:
    """Iterate over the integers in a value."""
    if isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def canonical(config: Any) -> Any:
    """Replace values that equal their default by None."""
    same_as_none = {
        entry.name: None
        for entry in dataclasses.fields(config)
        if entry.default is None
        and getattr(config, entry.name) == effective_value(replace(config, **{entry.name: None}), entry.name)
    }
    return replace(config, **same_as_none)


def effective_value(config: Any, name: str) -> Any:
    """Return a configuration value, with None resolved to its default."""
    value = getattr(config, name)
    if name == "windows":
        return tuple(value[n % len(value)] for n in range(config.layers)) if any(value) else ()
    if value is None and name == "d_head":
        return config.d_model // config.heads
    if value is None and name == "embedding_scale":
        return math.sqrt(config.d_model)
    if value is None and name in SIBLINGS:
        return getattr(config, SIBLINGS[name])
    return value


SIBLINGS = {
    "kv_heads": "heads",
    "distinct": "layers",
    "d_embedding": "d_model",
    "qkv_bias": "bias",
    "attention_dropout": "dropout",
    "decoder_layers": "layers",
}


def labels(config: Any) -> Values:
    """Return id2label and label2id with generic class names."""
    names = {str(n): f"LABEL_{n}" for n in range(config.classes)}
    return {"id2label": names, "label2id": {label: int(n) for n, label in names.items()}}


def classes(theirs: Values) -> int:
    """Return the number of classes."""
    id2label = theirs.get("id2label")
    return len(id2label) if id2label else theirs.get("num_labels") or 2


def common_value(theirs: Values, *names: str) -> Any:
    """Return the value of several names, which must agree."""
    values = {name: theirs.get(name) for name in names}
    for name, value in values.items():
        check_value(name, value, int)
    if len(set(values.values())) != 1:
        raise ValueError(f"{' and '.join(f'{name} = {value}' for name, value in values.items())} must be equal")
    return values[names[0]]
