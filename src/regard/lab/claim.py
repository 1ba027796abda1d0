"""A claim about attention: its statement, its measurement, and the verdict computed from the measurement."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regard.lab.criteria import LANGUAGES, Criterion, Findings, Judgement, Text, Verdict, decide

__all__ = [
    "FULL",
    "LANGUAGES",
    "QUICK",
    "Budget",
    "Claim",
    "Findings",
    "PickLabel",
    "Result",
    "Text",
    "Verdict",
    "seed_of",
]

PickLabel = Callable[[str, str], str]
"""Returns its English or its Chinese argument, for labels in pictures."""

SEEDS = 1000
"""Seeds of the repetitions of one measurement: `seed * SEEDS`, and those that follow."""


def seed_of(seed: int, repetition: int) -> int:
    """Return the seed of one repetition; no two seeds of a measurement share one.

    >>> from regard.lab.claim import seed_of
    >>> seed_of(0, 3), seed_of(7, 0)
    (3, 7000)
    """
    return seed * SEEDS + repetition


@dataclass(frozen=True)
class Claim:
    """One claim about attention.

    of: the items of the theory (see `theory.py`) that it measures. says: its statement.
    measure: the measurement. Its source is shown in the page, so it contains its imports. Its arguments are sizes, the
        seed, and the implementation under test, which can be replaced.
    criteria: what the numbers must be for the claim to hold; the verdict follows from them alone.
    finding: a sentence formatted with the findings. draw: plots the findings of the first repetition.
    quick: arguments for a measurement of at most a second.
    repetitions: how often it is measured, with different seeds; 1 if nothing is random, or if it repeats its rounds
        itself.
    """

    name: str
    theme: str
    of: tuple[str, ...]
    title: Text
    says: Text
    formula: str
    measure: Callable[..., Findings]
    criteria: tuple[Criterion, ...]
    finding: Text
    draw: Callable[[Any, Findings, PickLabel], None]
    caption: Text
    quick: Mapping[str, Any] = field(default_factory=dict)
    repetitions: int = 10

    def code(self, seed: int = 0, repetitions: int | None = None) -> str:
        """Return the source of the measurement and of its call, which runs as is."""
        source = textwrap.dedent(inspect.getsource(self.measure)).rstrip()
        count, first = repetitions or self.repetitions, seed_of(seed, 0)
        others = f"  # for the verdict, also with seeds to {first + count - 1}" if count > 1 else ""
        return f"{source}\n\n\nfindings = {self.measure.__name__}(seed={first}){others}\n"


@dataclass(frozen=True)
class Budget:
    """The size of a measurement: arguments that replace a measurement's defaults, and the most repetitions."""

    arguments: Callable[[Claim], Mapping[str, Any]]
    most: int | None = None

    def repetitions(self, claim: Claim) -> int:
        """Return how often a claim is measured."""
        return claim.repetitions if self.most is None else min(self.most, claim.repetitions)


FULL = Budget(lambda claim: {})
QUICK = Budget(lambda claim: claim.quick, most=4)


@dataclass(frozen=True)
class Result:
    """A measured claim. samples: the findings of every repetition."""

    claim: Claim
    samples: Sequence[Findings]
    seed: int
    cpu_seconds: float

    @property
    def findings(self) -> Findings:
        """Findings of the first repetition, which are drawn."""
        return self.samples[0]

    @cached_property
    def judgements(self) -> tuple[Judgement, ...]:
        """Criteria of the claim with what was measured."""
        return tuple(criterion.judge(self.samples) for criterion in self.claim.criteria)

    @property
    def verdict(self) -> Verdict:
        """Verdict that follows from the criteria."""
        return decide(self.judgements)

    def sentence(self, language: str) -> str:
        """Return the finding, with the mean of the repetitions or the number that is closest to another verdict."""
        numbers = dict(self.findings)
        for each in self.judgements:
            if each.criterion.rule != "interval" and each.middle == each.middle:
                numbers[each.criterion.key] = each.middle if each.criterion.rule == "mean" else each.closest
        return self.claim.finding.render(language, numbers)

    def as_json(self, language: str = "en") -> dict[str, Any]:
        """Return the verdict, the criteria and the findings for `--json`."""
        return {
            "claim": self.claim.name,
            "theory": list(self.claim.of),
            "title": self.claim.title.render(language),
            "verdict": self.verdict.value,
            "criteria": [{"met": each.outcome.value, "says": each.render(language)} for each in self.judgements],
            "finding": self.sentence(language),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "findings": self.findings,
        }
