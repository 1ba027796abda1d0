"""A family: how one kind of checkpoint says what our models say, as tables that are read in both directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.models.checkpoints.names import Extras, Rule

Values = dict[str, Any]
NEEDED, NO_EXTRAS = object(), Extras()


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """One value of a configuration: our name, theirs, and what is meant where theirs is absent or null."""

    ours: str
    theirs: str
    default: Any = NEEDED
    read: Callable[[Any], Any] = same
    write: Callable[[Any], Any] = same


def named(ours: str, theirs: str, default: Any, names: Mapping[Any, Any]) -> Field:
    """A value that has other names in theirs, {theirs: ours}; of several for one of ours, the first is written."""
    back = {own: other for other, own in reversed(list(names.items()))}

    def read(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"{theirs} = {value!r} is not supported; supported are {', '.join(map(repr, names))}")
        return names[value]

    def write(value: Any) -> Any:
        if value not in back:
            raise ValueError(f"{ours} = {value!r} has no name there")
        return back[value]

    return Field(ours, theirs, default, read, write)


def activation(ours: str, theirs: str, default: str) -> Field:
    """An activation by name."""
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
             "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"}  # fmt: skip
    return named(ours, theirs, default, names)


@dataclass(frozen=True)
class Architecture:
    """One entry of `architectures`: our class, and the table of names of its tensors.

    rules: of a configuration of ours. prefix: what the base model's names stand behind in a checkpoint with a head.
    unused: fields of the configuration that the class does not look at, and that a checkpoint need not say.
    written: whether a model is saved under this name; not, where it would have to hold more than our class has.
    """

    model: type[nn.Module]
    rules: Callable[[Any], tuple[Rule, ...]]
    extras: Extras = NO_EXTRAS
    prefix: str = ""
    unused: tuple[str, ...] = ()
    written: bool = True


def always(rules: tuple[Rule, ...]) -> Callable[[Any], tuple[Rule, ...]]:
    """A table that is the same for every configuration."""
    return lambda _: rules


def nothing(_: Any) -> Values:
    return {}


@dataclass(frozen=True)
class Family:
    """One model_type.

    fields: values that have a counterpart. fixed: values of ours that the family does not vary.
    only: values of theirs that are not looked at as long as they are among these; null and absent always pass.
    read, write: values that need more than one of the other side's, of their configuration and of ours.
    dropped: names of theirs that `write` may contradict under another name, and that are therefore not kept.
    generation: what generation_config.json says of our configuration. absent: values for names that we have no
        counterpart of, where the checkpoint that a model came from does not say them.
    """

    model_type: str
    config: type
    architectures: Mapping[str, Architecture]
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Values], Values] = nothing
    write: Callable[[Any], Values] = nothing
    dropped: tuple[str, ...] = ()
    generation: Callable[[Any], Values] = nothing
    absent: Callable[[Any], Values] = nothing

    def config_of(self, theirs: Values) -> Any:
        """Their configuration as ours; what we cannot do is an error."""
        for name, allowed in self.only.items():
            value = theirs.get(name)
            if value is not None and value not in allowed:
                raise ValueError(
                    f"{name} = {value!r} is not supported for {self.model_type}; supported is "
                    f"{' or '.join(map(repr, allowed))}"
                )
        values = dict(self.fixed)
        for entry in self.fields:
            value = theirs.get(entry.theirs)
            value = entry.default if value is None else value
            if value is NEEDED:
                raise ValueError(f"config.json must say {entry.theirs}")
            values[entry.ours] = entry.read(value)
        return self.config(**(values | self.read(theirs)))

    def values_of(self, config: Any) -> Values:
        """Our configuration as theirs."""
        values = {entry.theirs: entry.write(settled(config, entry.ours)) for entry in self.fields}
        return values | self.write(config)

    def why_not(self, config: Any, architecture: Architecture) -> str | None:
        """Why this configuration cannot be said in theirs, or none where it can: it must come back as it was."""
        try:
            back = self.config_of(self.values_of(config) | self.generation(config))
        except ValueError as error:
            return str(error)
        for entry in dataclasses.fields(config):
            before, after = settled(config, entry.name), settled(back, entry.name)
            if before != after and entry.name not in architecture.unused:
                return f"{entry.name} = {before!r} would come back as {after!r}"
        return None


def settled(config: Any, name: str) -> Any:
    """A value of a configuration, or what it means where it is none: the same as another value."""
    value = getattr(config, name)
    if name == "windows":
        return tuple(value[n % len(value)] for n in range(config.layers)) if any(value) else ()
    if value is None and name == "head_width":
        return config.width // config.heads
    if value is None and name == "embedding_scale":
        return math.sqrt(config.width)
    if value is None and name in SIBLINGS:
        return getattr(config, SIBLINGS[name])
    return value


SIBLINGS = {
    "groups": "heads",
    "distinct": "layers",
    "embedding_width": "width",
    "qkv_bias": "bias",
    "attention_dropout": "dropout",
    "decoder_layers": "layers",
}


def labels(config: Any) -> Values:
    """Names of classes, as the other side counts them."""
    names = {str(n): f"LABEL_{n}" for n in range(config.classes)}
    return {"id2label": names, "label2id": {label: int(n) for n, label in names.items()}}


def classes(theirs: Values) -> int:
    """How many classes there are."""
    named_ones = theirs.get("id2label")
    return len(named_ones) if named_ones else int(theirs.get("num_labels") or 2)


def agreed(theirs: Values, *names: str) -> Any:
    """The one value that several names have."""
    found = {name: theirs.get(name) for name in names}
    if len(set(found.values())) != 1:
        raise ValueError(f"{' and '.join(f'{name} = {value!r}' for name, value in found.items())} must be the same")
    return found[names[0]]
