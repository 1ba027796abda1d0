"""A property that an attention function must have, and the cases on which it is checked."""

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
    """A name, a statement, the capabilities that a target needs, and cases from small to large.

    `body` asserts the statement. Its parameters are passed by name: `attend`, tensors of the case (`q`, `k`, `v`,
    `mask`) and promises of the target (`alignment`, `growth`). It may return a remark for the report.
    """

    name: str
    statement: str
    theme: str
    needs: frozenset[str]
    cases: tuple[Case, ...]
    body: Callable[..., str | None]
    shrinks: bool = True  # whether inputs smaller than the cases are meaningful

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.body).parameters)


def conformance_property(
    *needs: str, cases: Sequence[Case], shrinks: bool = True
) -> Callable[[Callable[..., Any]], Property]:
    """Decorator that makes a function a property: its name, its docstring as the statement, and its body."""

    def make(body: Callable[..., str | None]) -> Property:
        statement = " ".join((body.__doc__ or "").split())
        name, theme = body.__name__.replace("_", "-"), body.__module__.rsplit(".", 1)[-1]
        return Property(name, statement, theme, frozenset(needs), tuple(cases), body, shrinks)

    return make
