"""A small model of transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """architecture: class in transformers; values: of its configuration.

    before: changes the values, where they need classes of transformers. after: changes the new model of transformers.
    padded: False where, in transformers, the longest row of a batch changes the others.
    """

    architecture: str
    values: dict[str, Any] = field(default_factory=dict)
    before: Callable[[dict[str, Any]], dict[str, Any]] = dict
    after: Callable[[Any], None] = lambda model: None
    padded: bool = True
