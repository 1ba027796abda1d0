"""Criteria of a claim: the interval in which a measured number must lie, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

LANGUAGES = ("en", "zh")

Findings = dict[str, Any]
"""Result of a measurement: numbers and strings by name, and lists of them for the picture."""

# Student's t for a two-sided 99% interval, 1 to 30 degrees of freedom
T995 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88,
        2.86, 2.85, 2.83, 2.82, 2.81, 2.80, 2.79, 2.78, 2.77, 2.76, 2.76, 2.75)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text in English and Chinese.

    >>> from regard.lab.criteria import Text
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
    NEARLY = "holds in part"
    FALSE = "false as printed"
    UNDECIDED = "not decided here"

    @property
    def text(self) -> Text:
        names = {"HOLDS": "成立", "NEARLY": "部分成立", "FALSE": "原文有误", "UNDECIDED": "此处未能判定"}
        return Text(self.value, names[self.name])


class Outcome(Enum):
    """Whether the measured numbers of a criterion are all within its interval, all outside, or neither."""

    MET = "met"
    FAILED = "failed"
    OPEN = "open"


@dataclass(frozen=True)
class Criterion:
    """A hypothesis about one number of the findings: that it lies between `low` and `high`.

    rule: "every": the number of every repetition does. "mean": the 99% interval of its mean does. "interval": the
        number is a list `[low, middle, high]`, the 99% interval of a median over rounds, which does and is at most
        `width` wide.
    part: if it fails, the claim still holds in part.
    """

    key: str
    says: Text
    low: float = -math.inf
    high: float = math.inf
    rule: str = "every"
    part: bool = False
    width: float = 0.4

    def judge(self, samples: Sequence[Findings]) -> Judgement:
        """Compare the numbers of all repetitions with the interval."""
        values = [sample[self.key] for sample in samples]
        if self.rule == "interval":
            return self._judge_interval(values)
        if any(value is None for value in values):  # NaN or infinite
            return Judgement(self, math.nan, math.nan, math.nan, Outcome.FAILED, len(values))
        if self.rule == "mean" and len(values) > 1:
            low, middle, high = mean_interval(values)
            return Judgement(self, low, middle, high, self._place(low, high), len(values))
        inside = [self.low <= value <= self.high for value in values]
        outcome = Outcome.MET if all(inside) else Outcome.OPEN if any(inside) else Outcome.FAILED
        return Judgement(self, min(values), sum(values) / len(values), max(values), outcome, len(values))

    def _judge_interval(self, values: Sequence[Sequence[float]]) -> Judgement:
        low, middle, high = (sorted(column)[len(values) // 2] for column in zip(*values, strict=True))
        outcome = self._place(low, high) if high - low <= self.width else Outcome.OPEN
        return Judgement(self, low, middle, high, outcome, len(values))

    def _place(self, low: float, high: float) -> Outcome:
        if self.low <= low and high <= self.high:
            return Outcome.MET
        return Outcome.FAILED if high < self.low or low > self.high else Outcome.OPEN


@dataclass(frozen=True)
class Judgement:
    """A criterion with what was measured: least number, mean and greatest, or an interval and its middle."""

    criterion: Criterion
    low: float
    middle: float
    high: float
    outcome: Outcome
    repetitions: int

    @property
    def closest(self) -> float:
        """The number that comes closest to another outcome: the worst one, or the best one of a failed criterion."""
        low, high = self.criterion.low, self.criterion.high
        if self.outcome is Outcome.FAILED and (self.high < low or self.low > high):
            return self.high if self.high < low else self.low
        return self.low if low - self.low > self.high - high or math.isinf(high) else self.high

    def render(self, language: str) -> str:
        """Return the criterion, what was measured, in how many repetitions, and what is required."""
        says, required = self.criterion.says.render(language), self._required(language)
        if math.isnan(self.middle):
            return Text(f"{says}: not finite; required: {required}", f"{says}：非有限数；要求{required}").render(
                language
            )
        low, middle, high, closest = (number(x) for x in (self.low, self.middle, self.high, self.closest))
        count = self.repetitions
        if self.criterion.rule == "interval":
            measured = Text(f"{middle} (99%: {low} to {high})", f"{middle}（99% 区间：{low} 至 {high}）")
        elif count == 1:
            measured = Text(closest, closest)
        elif self.criterion.rule == "mean":
            measured = Text(
                f"{middle} (99%: {low} to {high}; {count} repetitions)",
                f"{middle}（99% 区间：{low} 至 {high}；重复 {count} 次）",
            )
        elif math.isinf(self.criterion.low) or math.isinf(self.criterion.high):
            side = Text("least", "最小") if self.closest == self.low else Text("greatest", "最大")
            measured = Text(
                f"{closest} ({side.en} of {count} repetitions)", f"{closest}（{count} 次重复中{side.zh}者）"
            )
        else:
            measured = Text(f"{low} to {high} ({count} repetitions)", f"{low} 至 {high}（重复 {count} 次）")
        return Text(f"{says}: {measured.en}; required: {required}", f"{says}：{measured.zh}；要求{required}").render(
            language
        )

    def _required(self, language: str) -> str:
        low, high = number(self.criterion.low), number(self.criterion.high)
        if low == high:
            return Text(f"exactly {low}", f"恰为 {low}").render(language)
        if math.isinf(self.criterion.high):
            return Text(f"at least {low}", f"不小于 {low}").render(language)
        if math.isinf(self.criterion.low):
            return Text(f"at most {high}", f"不大于 {high}").render(language)
        return Text(f"{low} to {high}", f"在 {low} 与 {high} 之间").render(language)


def at_most(key: str, high: float, en: str, zh: str, **options: Any) -> Criterion:
    """Return the criterion that a number is at most `high`."""
    return Criterion(key, Text(en, zh), high=high, **options)


def at_least(key: str, low: float, en: str, zh: str, **options: Any) -> Criterion:
    """Return the criterion that a number is at least `low`."""
    return Criterion(key, Text(en, zh), low=low, **options)


def between(key: str, low: float, high: float, en: str, zh: str, **options: Any) -> Criterion:
    """Return the criterion that a number is between `low` and `high`; equal bounds require exactly that number."""
    return Criterion(key, Text(en, zh), low=low, high=high, **options)


def decide(judgements: Sequence[Judgement]) -> Verdict:
    """Return the verdict: false if a required criterion fails, in part if only others fail, undecided if one is open.

    >>> from regard.lab.criteria import at_most, decide
    >>> decide([at_most("error", 0.1, "error", "误差").judge([{"error": 0.2}])]).value
    'false as printed'
    """
    required = {each.outcome for each in judgements if not each.criterion.part}
    if Outcome.FAILED in required:
        return Verdict.FALSE
    every = {each.outcome for each in judgements}
    if Outcome.OPEN in required or every == {Outcome.MET, Outcome.OPEN}:
        return Verdict.UNDECIDED
    return Verdict.NEARLY if every - {Outcome.MET} else Verdict.HOLDS


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of independent measurements between the ends of its 99% interval.

    >>> from regard.lab.criteria import mean_interval
    >>> [round(x, 2) for x in mean_interval([0.9, 1.0, 1.1])]
    [0.43, 1.0, 1.57]
    """
    count = len(values)
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = (T995[count - 2] if count - 1 <= len(T995) else 2.7) * deviation / math.sqrt(count)
    return mean - half, mean, mean + half


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of independent measurements between the ends of its 99% interval, for any distribution.

    >>> from regard.lab.criteria import median_interval
    >>> median_interval(list(range(21)))
    (4, 10, 16)
    """
    ordered, count = sorted(values), len(values)
    rank, tail = 0, 0.5**count  # the probability that at most `rank` values are below the median
    while tail + math.comb(count, rank + 1) * 0.5**count <= 0.005:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return ordered[rank], ordered[count // 2], ordered[count - 1 - rank]


def number(value: float) -> str:
    """Format a number with four significant digits, or as a power of ten if it is far from 1.

    >>> from regard.lab.criteria import number
    >>> number(0.99512), number(3e-16), number(262144.0)
    ('0.9951', '3.0e-16', '262,144')
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"
