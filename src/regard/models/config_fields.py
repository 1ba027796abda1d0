"""Declarations of configuration fields that need more than a type: tokens, counts that may be 0, derived defaults.

Checkpoints and run directories are checked against them before a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field
from typing import Any, TypeVar

T = TypeVar("T")


def token(default: Any) -> Any:
    """A token id, or a tuple of token ids, below the vocabulary size.

    >>> from dataclasses import dataclass
    >>> from regard.models.config_fields import token
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     vocabulary: int
    ...     start: int = token(1)
    >>> Config(100).start
    1
    """
    return field(default=default, metadata={"lowest": 0, "token": True})


def optional_count(default: Any) -> Any:
    """A number, or a tuple of numbers, that may be 0."""
    return field(default=default, metadata={"lowest": 0})


def same_as(name: str) -> Any:
    """A field that has the value of field `name` unless it is given."""
    return computed_field(lambda config: effective_value(config, name))


def computed_field(compute: Callable[[Any], Any]) -> Any:
    """A field that is computed from the others unless it is given."""
    return field(default=None, metadata={"derived": compute})


def per_layer(default: Any) -> Any:
    """A tuple that is cycled over the layers, or one value for all of them."""
    return field(default=default, metadata={"per_layer": True})


def cycle(values: tuple[T, ...], layers: int) -> tuple[T, ...]:
    """Repeat values per layer until there is one for each."""
    return tuple(values[n % len(values)] for n in range(layers))


def effective_value(config: Any, name: str) -> Any:
    """Return a configuration value, with None resolved to its default and tuples per layer in full.

    >>> import regard as rg
    >>> from regard.models.config_fields import effective_value
    >>> config = rg.models.LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> config.d_head, effective_value(config, "d_head")
    (None, 8)
    """
    value, declared = getattr(config, name), declaration(config, name).metadata
    if value is None and "derived" in declared:
        return declared["derived"](config)
    if "per_layer" in declared and value is not None:
        value = value if isinstance(value, tuple) else (value,)
        if declaration(config, name).default == () and all(entry is None for entry in value):
            return ()  # no limit in any layer
        return cycle(value, config.layers)
    return value


def declaration(config: Any, name: str) -> Field[Any]:
    """Return the field of a configuration, or of its class, by name."""
    return config.__dataclass_fields__[name]
