"""Draw subjects, run them in many ways, and simplify what fails."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch

from tools.differential.draw import Draw
from tools.differential.families import FAMILIES
from tools.differential.subject import Subject
from tools.differential.ways import EVERY_FORM, WAYS, Mismatch, NotApplicable, Run, Yardstick, runs

WAYS_OF_A_CASE = 3  # in addition to those that are run in every form
COMPILED = 40  # one case of so many is compiled, since it takes seconds
SHRINKING = 20.0  # seconds


@dataclass(frozen=True)
class Finding:
    """A way that raises or differs from the yardstick, and its configuration."""

    family: str
    seed: int
    way: str  # form/way
    reason: str
    fixed: dict[str, int]  # choices that are not option 0
    shown: dict[str, str]

    def explains(self, other: Finding) -> bool:
        """Return whether the other finding has the same family, the same way or form, and these choices."""
        alike = set(self.way.rsplit("/", 1)) & set(other.way.rsplit("/", 1))
        return self.family == other.family and bool(alike) and self.fixed.items() <= other.fixed.items()

    def __str__(self) -> str:
        settings = "".join(f"    {name}: {self.shown[name]}\n" for name in self.fixed)
        return (
            f"{self.family}, {self.way}: {self.reason}\n{settings}"
            "  Again:\n"
            "    from tools.differential import replay\n"
            f"    replay({self.family!r}, seed={self.seed}, way={self.way!r}, fixed={self.fixed!r})\n"
        )


def prepare(family: str, seed: int, fixed: Mapping[str, int] | None = None) -> tuple[Draw, Subject, Yardstick]:
    """A subject of a family, and its yardstick."""
    draw = Draw(seed, fixed)
    subject = FAMILIES[family](draw)
    module = subject.build()
    yardstick = Yardstick(subject, module)
    generator = torch.Generator().manual_seed(draw.random("cotangents").randrange(2**31))
    yardstick.weights += [torch.randn(out.shape, generator=generator) for out in yardstick.outputs()]
    return draw, subject, yardstick


def replay(family: str, *, seed: int, way: str, fixed: Mapping[str, int] | None = None) -> None:
    """Run one way of one configuration again; raises what it raised."""
    draw, subject, yardstick = prepare(family, seed, fixed)
    form, name = way.rsplit("/", 1)
    if form not in subject.forms:
        raise NotApplicable
    torch.manual_seed(seed)
    WAYS[name](Run(subject, yardstick.of_form(subject.forms[form]), form, draw))


def check(
    family: str,
    seed: int,
    ways: Sequence[str],
    fixed: Mapping[str, int] | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Finding]:
    """Yield the findings of these ways in one configuration; `counts` counts the runs that held, by family."""
    try:
        draw, subject, yardstick = prepare(family, seed, fixed)
    except Exception as error:
        yield Finding(family, seed, "yardstick", describe_error(error), {}, {})
        return
    for name, function, run in runs(subject, yardstick, draw, ways):
        torch.manual_seed(seed)
        try:
            function(run)
        except NotApplicable:
            continue
        except Exception as error:
            yield make_finding(family, name, describe_error(error), draw)
            continue
        if counts is not None:
            counts[family] += 1


def make_finding(family: str, way: str, reason: str, draw: Draw) -> Finding:
    fixed = {name: number for name, number in draw.chosen.items() if number}
    return Finding(family, draw.seed, way, reason, fixed, dict(draw.shown))


def simplify(finding: Finding, seconds: float = SHRINKING) -> Finding:
    """Return the finding with as many choices as possible at their first option."""
    if finding.way == "yardstick":
        return finding  # no way to run again
    until = time.monotonic() + seconds
    kind = finding.reason.split(":")[0] if finding.reason.startswith("raises") else "sequence"
    again = True
    while again:
        again = False
        for name, number in list(finding.fixed.items()):
            for less in range(number):
                if time.monotonic() > until:
                    return finding
                fixed = finding.fixed | {name: less}
                reason = why_it_fails(finding, fixed)
                if reason is None or reason.startswith("raises") != kind.startswith("raises"):
                    continue
                draw, _, _ = prepare(finding.family, finding.seed, fixed)
                draw.chosen |= {name: number for name, number in fixed.items() if name in draw.chosen}
                finding, again = make_finding(finding.family, finding.way, reason, draw), True
                break
    return finding


def why_it_fails(finding: Finding, fixed: Mapping[str, int]) -> str | None:
    """Return why the way fails with these choices, or None if it does not."""
    try:
        replay(finding.family, seed=finding.seed, way=finding.way, fixed=fixed)
    except NotApplicable:
        return None
    except Exception as error:
        return describe_error(error)
    return None


def is_confirmed(finding: Finding) -> bool:
    """Whether other numbers fail too.

    A gradient jumps where a ReLU's input or the difference of two maxima is within a rounding of 0, and in bfloat16 so
    does the norm of a small output: that is no error, and it does not happen twice.
    """
    if not finding.way.rsplit("/", 1)[-1].startswith(("gradients", "checkpointing", "jvp", "duals", "bfloat16")):
        return True
    others = [finding.fixed | {"values": number} for number in range(4) if number != finding.fixed.get("values")]
    return any(why_it_fails(finding, fixed) is not None for fixed in others)


def describe_error(error: Exception) -> str:
    if isinstance(error, Mismatch):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/regard/" in frame.filename]
    where = f" ({frames[-1].filename.rsplit('/regard/', 1)[1]}:{frames[-1].lineno})" if frames else ""
    lines = str(error).strip().splitlines() or [""]
    return f"raises {type(error).__name__}: {lines[0]}{where}"


def search(
    seed: int,
    seconds: float,
    *,
    families: Sequence[str] = (),
    ways: Sequence[str] = (),
    proceed: bool = False,
    report: Callable[[Finding], None] = print,
    progress: Callable[[Counter[str]], None] = lambda counts: None,
) -> tuple[list[Finding], Counter[str]]:
    """Findings until the time is over: the first, or with `proceed` one of each family, way and reason."""
    random, counts, findings = Random(seed), Counter[str](), list[Finding]()
    others = [name for name in WAYS if name not in EVERY_FORM and name != "compiled"]
    end, cases = time.monotonic() + seconds, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while time.monotonic() < end or not cases:
            for family in random.sample(order := list(families or FAMILIES), len(order)):
                chosen = list(ways) or [*EVERY_FORM_ORDER, *random.sample(others, WAYS_OF_A_CASE)]
                if not ways and random.randrange(COMPILED) == 0:
                    chosen.append("compiled")
                for finding in check(family, random.randrange(2**31), chosen, counts=counts):
                    if any(known.explains(finding) for known in findings) or not is_confirmed(finding):
                        continue
                    finding = simplify(finding)
                    if any(known.explains(finding) for known in findings):
                        continue
                    findings.append(finding)
                    report(finding)
                    if not proceed:
                        return findings, counts
                cases += 1
                progress(counts)
                if time.monotonic() > end:
                    break
    return findings, counts


EVERY_FORM_ORDER = [name for name in WAYS if name in EVERY_FORM]
