"""A small model of transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """architecture: class in transformers; values: of its configuration.

    before: changes the values, where they need classes of transformers. after: changes the new model of transformers.
    experts_by_name: whether tensors of experts are stored one by one, and held in one tensor by transformers.
    repeats: False where transformers rounds differently in another copy of the same model.
    padded: False where, in transformers, the longest row of a batch changes the others.
    """

    architecture: str
    values: dict[str, Any] = field(default_factory=dict)
    before: Callable[[dict[str, Any]], dict[str, Any]] = dict
    after: Callable[[Any], None] = lambda model: None
    padded: bool = True
    experts_by_name: bool = False
    repeats: bool = True
