"""A claim of the theory: what it says, how it is measured, and what the measurement makes of it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LANGUAGES = ("en", "zh")

Findings = dict[str, Any]
"""What a measurement returns: numbers and words by name, and lists of them for the picture."""

PickLabel = Callable[[str, str], str]
"""Picks the English or the Chinese of two wordings, for labels in pictures."""


@dataclass(frozen=True)
class Text:
    """The same in both languages.

    >>> from regard.lab.claim import Text
    >>> Text("{n} keys", "{n} 个键").render("zh", {"n": 3})
    '3 个键'
    """

    en: str
    zh: str

    def render(self, language: str, found: Findings | None = None) -> str:
        """In a language, with what was found filled in."""
        said = self.zh if language == "zh" else self.en
        return said if found is None else said.format_map(found)


class Verdict(Enum):
    """What a measurement makes of a claim."""

    HOLDS = "holds"
    NEARLY = "holds approximately"
    FALSE = "false as printed"

    @property
    def text(self) -> Text:
        return Text(self.value, {"HOLDS": "成立", "NEARLY": "近似成立", "FALSE": "原文有误"}[self.name])


def grade(holds: bool, nearly: bool = False) -> Verdict:
    """The verdict on what is exactly so, nearly so, or not so.

    >>> from regard.lab.claim import grade
    >>> grade(False, nearly=True).value
    'holds approximately'
    """
    return Verdict.HOLDS if holds else Verdict.NEARLY if nearly else Verdict.FALSE


@dataclass(frozen=True)
class Claim:
    """One claim.

    of: the items of the theory (see `theory.py`) that it measures.
    measure: the code that the page shows, so it imports what it needs; its arguments are sizes, the seed, and the thing
        that is measured, which can be replaced by another.
    judge: the verdict, from nothing but what was found. finding: a sentence that the found numbers are filled into.
    draw: the picture of what was found. quick: arguments of a measurement that takes a second at most.
    """

    name: str
    theme: str
    of: tuple[str, ...]
    title: Text
    says: Text
    formula: str
    measure: Callable[..., Findings]
    judge: Callable[[Findings], Verdict]
    finding: Text
    draw: Callable[[Any, Findings, PickLabel], None]
    caption: Text
    quick: Mapping[str, Any] = field(default_factory=dict)

    def code(self, seed: int = 0) -> str:
        """The measurement as it ran, in lines that run as they stand."""
        source = textwrap.dedent(inspect.getsource(self.measure)).rstrip()
        return f"{source}\n\n\nfound = {self.measure.__name__}(seed={seed})\n"


@dataclass(frozen=True)
class Budget:
    """What a measurement may cost: arguments of a claim's measurement that differ from its own."""

    arguments: Callable[[Claim], Mapping[str, Any]]


FULL = Budget(lambda claim: {})
QUICK = Budget(lambda claim: claim.quick)


@dataclass(frozen=True)
class Result:
    """A claim that was measured."""

    claim: Claim
    found: Findings
    verdict: Verdict
    seed: int
    cpu_seconds: float

    def as_json(self, language: str = "en") -> dict[str, Any]:
        """For `--json`: the verdict, the finding and all that was found."""
        return {
            "claim": self.claim.name,
            "theory": list(self.claim.of),
            "title": self.claim.title.render(language),
            "verdict": self.verdict.value,
            "finding": self.claim.finding.render(language, self.found),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "found": self.found,
        }
