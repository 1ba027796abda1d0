"""Reading and checking of files saved with a run. Any defect raises a `UserError` that names the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from regard.errors import RunLocked, UserError
from regard.field_types import check_fields, check_value, short_repr
from regard.files import read_json
from regard.printable import printable


class BadFile(UserError):
    """A file that cannot be used; the message starts with its path."""


@contextmanager
def name_in_errors(path: Path | str, advice: str = "was it written by another version, or changed?") -> Iterator[None]:
    """Convert any error raised in this context, caused by the content of a file, to a `UserError` that names it."""
    try:
        yield
    except (BadFile, RunLocked):
        raise
    except UserError as error:
        raise BadFile(f"{path}: {error}") from error
    except Exception as error:
        raise BadFile(f"{path}: {_reason(error, path)}; {advice}") from error


def _reason(error: Exception, path: Path | str) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "needs more memory than is available"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    text = str(error).removeprefix(f"{path}:").removeprefix(f"{path} ")
    words = printable(" ".join(text.split()))[:600]
    if isinstance(error, KeyError):
        return f"{words} is missing"
    return words if isinstance(error, ValueError) and words else f"cannot be read ({type(error).__name__}: {words})"


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file."""
    with name_in_errors(path):
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"must contain a JSON object, got {short_repr(content)}")
        return content


def check_values(values: Mapping[str, Any], types: Mapping[str, Any], before: str = "") -> None:
    """Raise ValueError if a value is missing or has the wrong type; values that may be null may be missing."""
    for name, wanted in types.items():
        check_value(before + name, values.get(name), wanted)


def build(kind: Any, values: Any, name: str) -> Any:
    """Build a dataclass from a JSON object, with lists as tuples. name: the name of the object in errors."""
    known = {each.name for each in fields(kind)}
    if unknown := set(values) - known:
        raise ValueError(
            f"{name} has {', '.join(sorted(map(short_repr, unknown)))}, which {kind.__name__} does not accept"
        )
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    check_fields(kind, arguments, {key: f"{name}.{key}" for key in arguments})
    if missing := [each.name for each in fields(kind) if each.default is MISSING and each.name not in arguments]:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    return kind(**arguments)
