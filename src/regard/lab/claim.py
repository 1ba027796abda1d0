"""A claim about attention: its statement, its measurement, and the verdict computed from the measurement."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LANGUAGES = ("en", "zh")

Findings = dict[str, Any]
"""Result of a measurement: numbers and strings by name, and lists of them for the picture."""

PickLabel = Callable[[str, str], str]
"""Returns its English or its Chinese argument, for labels in pictures."""


@dataclass(frozen=True)
class Text:
    """A text in English and Chinese.

    >>> from regard.lab.claim import Text
    >>> Text("{n} keys", "{n} 个键").render("zh", {"n": 3})
    '3 个键'
    """

    en: str
    zh: str

    def render(self, language: str, findings: Findings | None = None) -> str:
        """Return the text in a language, formatted with the findings."""
        text = self.zh if language == "zh" else self.en
        return text if findings is None else text.format_map(findings)


class Verdict(Enum):
    """Whether a claim holds according to its measurement."""

    HOLDS = "holds"
    NEARLY = "holds approximately"
    FALSE = "false as printed"

    @property
    def text(self) -> Text:
        return Text(self.value, {"HOLDS": "成立", "NEARLY": "近似成立", "FALSE": "原文有误"}[self.name])


def grade(holds: bool, nearly: bool = False) -> Verdict:
    """Return the verdict for a claim that holds, nearly holds, or does not hold.

    >>> from regard.lab.claim import grade
    >>> grade(False, nearly=True).value
    'holds approximately'
    """
    return Verdict.HOLDS if holds else Verdict.NEARLY if nearly else Verdict.FALSE


@dataclass(frozen=True)
class Claim:
    """One claim about attention.

    of: the items of the theory (see `theory.py`) that it measures. says: its statement.
    measure: the measurement. Its source is shown in the page, so it contains its imports. Its arguments are sizes, the
        seed, and the implementation under test, which can be replaced.
    judge: computes the verdict from the findings alone. finding: a sentence formatted with the findings.
    draw: plots the findings. quick: arguments for a measurement of at most a second.
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
        """Return the source of the measurement and of its call, which runs as is."""
        source = textwrap.dedent(inspect.getsource(self.measure)).rstrip()
        return f"{source}\n\n\nfindings = {self.measure.__name__}(seed={seed})\n"


@dataclass(frozen=True)
class Budget:
    """The size of a measurement: arguments of a claim's measurement that replace its defaults."""

    arguments: Callable[[Claim], Mapping[str, Any]]


FULL = Budget(lambda claim: {})
QUICK = Budget(lambda claim: claim.quick)


@dataclass(frozen=True)
class Result:
    """A measured claim."""

    claim: Claim
    findings: Findings
    verdict: Verdict
    seed: int
    cpu_seconds: float

    def as_json(self, language: str = "en") -> dict[str, Any]:
        """Return the verdict and the findings for `--json`."""
        return {
            "claim": self.claim.name,
            "theory": list(self.claim.of),
            "title": self.claim.title.render(language),
            "verdict": self.verdict.value,
            "finding": self.claim.finding.render(language, self.findings),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "findings": self.findings,
        }
