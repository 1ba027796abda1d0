"""The modules that mix tokens and are not in a record: recurrent layers, and attention that regard does not compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from regard.linear import LinearAttention
from regard.nn.recurrent import RecurrentLayer
from regard.view.module_calls import RunningModule

ATTENTION = re.compile(r"Att(entio)?n\d*$")
RECURRENT = re.compile(r"(DeltaNet|Mixer|MambaLayer|ShortConv(olution)?|RecurrentBlock)$")
"""Names of classes of Transformers, whose layers have no common type."""


class Uncaptured:
    """Which modules ran during a capture, and which of them called regard's attention."""

    def __init__(self) -> None:
        self.recurrent: dict[str, None] = {}
        self.attention: dict[str, None] = {}
        self.torch: dict[str, None] = {}  # modules that called torch's function
        self.around: set[str] = set()  # modules inside which regard's attention ran
        self.direct: set[str] = set()  # modules that called it themselves

    def enter_module(self, running: RunningModule) -> None:
        kind = type(running.module).__name__
        if _is_recurrent(running.module) or RECURRENT.search(kind):
            self.recurrent[running.name or kind] = None
        elif isinstance(running.module, nn.MultiheadAttention) or ATTENTION.search(kind):
            self.attention[running.name or kind] = None

    def call_regard(self, stack: Sequence[RunningModule]) -> None:
        """Note that the innermost of these modules called regard's attention."""
        names = [running.name or type(running.module).__name__ for running in stack]
        self.around.update(names)
        self.direct.add(names[-1])

    def call_torch(self, stack: Sequence[RunningModule]) -> None:
        """Note that the innermost of these modules called torch's function, unless an engine of regard did."""
        if stack:
            name = stack[-1].name or type(stack[-1].module).__name__
            if name not in self.direct:
                self.torch[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that ran and are not in the record, without modules inside or around others."""
        recurrent = [name for name in self.recurrent if not _has_outer(name, self.recurrent)]
        attention = [
            name for name in self.attention
            if name not in self.around and not _has_outer(name, self.recurrent) and not _has_inner(name, self.attention)
        ]  # fmt: skip
        others = [name for name in self.torch if not _has_outer(name, {**self.recurrent, **self.attention})]
        return tuple(dict.fromkeys([*recurrent, *attention, *others]))


def _is_recurrent(module: nn.Module) -> bool:
    kinds = RecurrentLayer, LinearAttention
    return any(isinstance(each, kinds) for each in (module, *vars(module).values()))


def _has_outer(name: str, names: Any) -> bool:
    return any(name.startswith(f"{other}.") for other in names)


def _has_inner(name: str, names: Any) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


def shorten(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and the number of the others.

    >>> from regard.view.uncaptured import shorten
    >>> shorten(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def container(name: str) -> str:
    """Return the stack that a layer belongs to: its name up to the number of the layer.

    >>> from regard.view.uncaptured import container
    >>> container("encoder.layers.3.attention")
    'encoder.layers'
    """
    return re.split(r"(?:^|\.)\d+(?:\.|$)", name)[0]
