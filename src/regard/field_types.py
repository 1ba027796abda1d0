"""Type checks for values read from files, against the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

MAX_INT = 2**31 - 1  # limit of integers: no size, position or token is larger
MAX_CHARACTERS = 10_000  # limit of strings


def short_repr(value: object, most: int = 80) -> str:
    """Return a repr for an error message, shortened to `most` characters.

    >>> from regard.field_types import short_repr
    >>> short_repr("a" * 1000, 10)
    "'aaaaaaaaa..."
    """
    try:
        text = repr(value[: 2 * most]) if isinstance(value, str) else repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        text = f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= most else text[:most] + "..."


def check_fields(kind: type, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless every value has the type of the dataclass field with its name.

    names: the names of the fields in the file, where they differ.

    >>> from dataclasses import dataclass
    >>> from regard.field_types import check_fields
    >>> @dataclass
    ... class Size:
    ...     d_model: int
    >>> check_fields(Size, {"d_model": 1.5})
    Traceback (most recent call last):
    ValueError: d_model must be a whole number, but is 1.5
    """
    expected = hints(kind)
    for name, value in values.items():
        if name in expected:
            check_value((names or {}).get(name, name), value, expected[name])


def check_value(name: str, value: Any, expected: Any) -> None:
    """Raise ValueError, with the name, unless a value has this type."""
    if not _fits(value, expected):
        raise ValueError(f"{name} must be {_describe_type(expected)}, but is {short_repr(value)}")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        check_fields(type(value), held, {inner: f"{name}.{inner}" for inner in held})


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name; Any for a type that cannot be resolved."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            alone = type("alone", (), {"__annotations__": {name: annotation}, "__module__": base.__module__})
            try:
                hints |= typing.get_type_hints(alone)
            except NameError:  # imported for type checkers only, or inside a function
                hints[name] = Any
    return hints


def _fits(value: Any, expected: Any) -> bool:
    """Whether a value has this type; supports the types used by fields."""
    origin, parts = get_origin(expected), get_args(expected)
    if expected is Any:
        return True
    if expected is None or expected is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is Ellipsis:
            return all(_fits(each, parts[0]) for each in value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if origin is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, parts[1]) for each in value.values())
    if expected is bool:
        return isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT
    if expected is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (abs(value) < 2**1023 if isinstance(value, int) else math.isfinite(value))
    if expected is str:
        return isinstance(value, str) and len(value) <= MAX_CHARACTERS
    if getattr(expected, "_is_protocol", False):  # a component of this library, which validates itself
        return dataclasses.is_dataclass(value)
    return isinstance(value, origin or expected)


def _describe_type(expected: Any) -> str:
    """Describe a type in words."""
    origin, parts = get_origin(expected), get_args(expected)
    if expected is None or expected is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_describe_type, parts))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple:
        kinds = parts[:1] if parts[1:] == (Ellipsis,) else parts
        return f"a list of {' and '.join(dict.fromkeys(map(_describe_type, kinds)))}"
    if origin is list:
        return f"a list, each {_describe_type(parts[0])}"
    if origin is dict:
        return f"an object, each {_describe_type(parts[1])}"
    words: dict[Any, str] = {dict: "an object", list: "a list", Any: "anything"}
    words |= {bool: "true or false", int: "a whole number", float: "a finite number", str: "a short text"}
    return words.get(expected) or f"a {getattr(expected, '__name__', expected)}"


def check_options(options: Any) -> None:
    """Raise if a field of a dataclass does not have its declared type."""
    check_fields(type(options), {each.name: getattr(options, each.name) for each in dataclasses.fields(options)})


def check_maximum(options: Any, **largest: int) -> None:
    """Raise if an option exceeds its upper bound."""
    for name, bound in largest.items():
        if getattr(options, name) > bound:
            raise ValueError(f"{name} must be at most {bound}, but is {getattr(options, name)}")


def check_minimum(options: Any, **least: int) -> None:
    """Raise if an option is below its lower bound."""
    for name, bound in least.items():
        if getattr(options, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, but is {getattr(options, name)}")
