"""A property: what is demanded of an attention, and the cases on which it is demanded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.check.case import Case

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Property:
    """A name, a sentence of what is demanded and why, what a target must be able to do, and cases from tiny to large.

    `body` asserts what is demanded. Its parameters are taken by name: `attend`, tensors of the case (`q`, `k`, `v`,
    `mask`) and promises of the target (`alignment`, `growth`). It may return a remark for the report.
    """

    name: str
    statement: str
    theme: str
    needs: frozenset[str]
    cases: tuple[Case, ...]
    body: Callable[..., str | None]
    shrinks: bool = True  # whether smaller inputs than those of the cases mean anything

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.body).parameters)


def conformance_property(
    *needs: str, cases: Sequence[Case], shrinks: bool = True
) -> Callable[[Callable[..., Any]], Property]:
    """Makes a property of a function: its name, its docstring, and the body that asserts it."""

    def make(body: Callable[..., str | None]) -> Property:
        sentence = " ".join((body.__doc__ or "").split())
        name, theme = body.__name__.replace("_", "-"), body.__module__.rsplit(".", 1)[-1]
        return Property(name, sentence, theme, frozenset(needs), tuple(cases), body, shrinks)

    return make
