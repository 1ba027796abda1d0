"""Random choices with names, so that a configuration can be printed, replayed and simplified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Choices drawn from a seed, each by its name alone: fixing one does not change the others.

    fixed: numbers of options, by the name of the choice; if it is given, every other choice is option 0. Options are
    listed from the simplest to the least simple, so that a configuration is made simpler by choosing option 0.

    >>> from tools.differential.draw import Draw
    >>> draw = Draw(seed=3, fixed={"heads": 2})
    >>> draw.pick("heads", [1, 2, 4]), draw.pick("layers", [1, 2]), draw.shown
    (4, 1, {'heads': '4', 'layers': '1'})
    """

    def __init__(self, seed: int, fixed: Mapping[str, int] | None = None) -> None:
        self.seed, self.fixed = seed, fixed
        self.chosen: dict[str, int] = {}  # number of the option by the name of the choice
        self.shown: dict[str, str] = {}

    def pick(self, name: str, options: Sequence[T]) -> T:
        """One of the options; the same name always gives the same one."""
        number = self.random(name).randrange(len(options)) if self.fixed is None else self.fixed.get(name, 0)
        number = min(number, len(options) - 1)  # another choice may have left fewer options
        self.chosen[name], self.shown[name] = number, repr(options[number])
        return options[number]

    def random(self, name: str) -> Random:
        """A generator for what is too long to be an option, such as the places of holes in a mask."""
        return Random(f"{self.seed}:{name}")
