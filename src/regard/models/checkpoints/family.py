"""Families: bidirectional tables between a kind of checkpoint and the models of regard.

"Theirs" is the configuration and the tensors of the checkpoint, "ours" those of regard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from regard.field_types import check_value, hints, short_repr
from regard.models.checkpoints.tensor_names import Extras, Rule, table
from regard.models.config_fields import declaration, effective_value
from regard.models.language import LanguageConfig
from regard.models.translation import TransformerConfig
from regard.models.whisper import WhisperConfig

Values = dict[str, Any]
TENSORS = "tensors of the checkpoint"  # key of the tensor names among the configuration values
REQUIRED, NO_EXTRAS = object(), Extras()


def identity(value: Any) -> Any:
    return value


COMMON: dict[str, Any] = {
    "architectures": list[str], "model_type": str, "id2label": dict[str, Any], "num_labels": int,
    "tie_word_embeddings": bool, "pad_token_id": int, "is_decoder": bool, "add_cross_attention": bool,
}  # fmt: skip
"""Types of values that config.json of any family may have; null is allowed."""


CAUSAL = (LanguageConfig, TransformerConfig, WhisperConfig)
"""Configurations of models that are always causal, or have a causal decoder."""


def check_types(theirs: Values, types: Mapping[str, Any], before: str = "") -> None:
    """Raise ValueError if a value has the wrong type. A mapping as a type gives the types inside an object."""
    for name, expected in types.items():
        value = theirs.get(name)
        if isinstance(expected, Mapping):
            check_value(before + name, value, dict[str, Any] | None)
            check_types(value or {}, expected, f"{before}{name}.")
        else:
            check_value(before + name, value, expected | None)


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


ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
"""Activations of all families, {theirs: ours}."""


def activation(ours: str, theirs: str, default: str) -> Field:
    """A field for an activation."""
    return mapped_field(ours, theirs, default, ACTIVATIONS)


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
    """One model_type. Modules of `families` list theirs in `FAMILIES`; nothing else refers to a family by name.

    title: name in the documentation.
    fields: values with a one-to-one counterpart. fixed: values of ours that are constant in the family.
    only: supported values of theirs without counterpart; other values raise, null and absent are accepted.
    read, write: compute the values that depend on several values of the other side.
    types: types of the values that `read` uses, by name; null is allowed. Values of `fields` are checked against ours.
    generation_types: types of the values that take precedence over config.json if generation_config.json has them.
    aliases: other names that transformers accepts, {alias: name}. A file may have both if the values are equal.
    dropped: names of theirs that are not kept on saving, because `write` may set another name for the same thing.
    generation: values for generation_config.json. absent: values for names without counterpart, used if the checkpoint
        that a model came from does not have them.
    """

    model_type: str
    title: str
    config: type
    architectures: Mapping[str, Architecture]
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Values], Values] = no_values
    write: Callable[[Any], Values] = no_values
    types: Mapping[str, Any] = field(default_factory=dict)
    generation_types: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    generation: Callable[[Any], Values] = no_values
    absent: Callable[[Any], Values] = no_values

    def generation_values(self, generation_json: Values) -> Values:
        """Return the values of generation_config.json that are part of our configuration."""
        check_types(generation_json, self.generation_types)
        return {name: generation_json[name] for name in self.generation_types if generation_json.get(name) is not None}

    def config_of(self, theirs: Values) -> Any:
        """Convert their configuration to ours; raise if something is not supported."""
        theirs = self._without_aliases(theirs)
        check_types(theirs, COMMON | dict(self.types) | dict(self.generation_types))
        if theirs.get("per_layer_config"):
            raise ValueError("per_layer_config is not supported: all layers must have the same configuration")
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
            check_size(entry.theirs, self.config, entry.ours, values[entry.ours])
        config = self.config(**(values | self.read(theirs)))
        if not theirs.get("is_causal", True) and getattr(config, "causal", type(config) in CAUSAL):
            raise ValueError(
                f"is_causal = {theirs['is_causal']} is not supported for {self.model_type}: every token attends to "
                "earlier tokens only"
            )
        check_config(config, {entry.ours: entry.theirs for entry in self.fields})
        return canonical(config)

    def _without_aliases(self, theirs: Values) -> Values:
        """Replace aliases by the names that they stand for; raise if their values differ."""
        values = dict(theirs)
        for alias, name in self.aliases.items():
            value = values.pop(alias, None)
            if values.get(name) is None:
                values[name] = value
            elif value not in (None, values[name]):
                raise ValueError(
                    f"{alias} = {short_repr(value)} must equal {name} = {short_repr(values[name])}: both are the same "
                    "value; remove the wrong one from config.json"
                )
        return values

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


LAYER_COUNTS = ("layers", "decoder_layers", "distinct", "depths")
MAX_LAYERS = 10_000
"""Limit per stack, checked before a model is built; the number of tensors limits it again later."""


def check_config(config: Any, names: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless all values of a configuration of ours, including nested ones, are valid.

    names: names of the fields in the file, where they differ.
    """
    values = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    for name, value in values.items():
        check_size((names or {}).get(name, name), type(config), name, value)
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                check_config(part)
    words = values.get("target_vocabulary") or values.get("vocabulary")
    for name in values:
        for token in _numbers(values[name]) if "token" in declaration(config, name).metadata else ():
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


def check_size(shown: str, config: type, name: str, value: Any) -> None:
    """Raise ValueError unless a value has the type and range of field `name` of a configuration class.

    shown: its name in the file.
    """
    check_value(shown, value, hints(config)[name])
    lowest = declaration(config, name).metadata.get("lowest", 0 if name.endswith("layers") else 1)
    for number in _numbers(value):
        if number < lowest:
            raise ValueError(f"{shown} must be at least {lowest}, got {short_repr(value)}")
        if number > MAX_LAYERS and name in LAYER_COUNTS:
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
