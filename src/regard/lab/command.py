"""What `regard lab` does with its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.text import Text as Line

from regard.files import check_writable, whole_text
from regard.lab.claim import LANGUAGES, Claim, Result, Verdict
from regard.lab.notebook import notebook
from regard.lab.page import page
from regard.lab.runner import chosen, run

STYLES = {Verdict.HOLDS: "green", Verdict.NEARLY: "yellow", Verdict.FALSE: "red"}


@dataclass(frozen=True)
class Asked:
    """What was asked for, found to be possible before minutes are spent on it."""

    claims: Sequence[Claim]
    page: Path | None
    notebook: Path | None
    language: str
    seed: int

    @staticmethod
    def of(names: Sequence[str], out: Path | None, notebook: Path | None, language: str, seed: int) -> Asked:
        if language not in LANGUAGES:
            raise ValueError(f"--lang must be {' or '.join(LANGUAGES)}, but is {language!r}")
        claims = chosen(names)
        if out is None and not names:
            out = Path("lab.html")
        for path in (out, notebook):
            if path is not None:
                check_writable(path)
        needs = {"matplotlib", "jinja2", "latex2mathml", "pygments"} if out else set()
        needs |= {"matplotlib", "nbformat"} if notebook else set()
        if missing := sorted(name for name in needs if find_spec(name) is None):
            raise ValueError(f"the lab's page needs {', '.join(missing)}: pip install 'regard[lab]'")
        return Asked(claims, out, notebook, language, seed)


def measured(asked: Asked, tell: Callable[[str], None]) -> Iterator[Result]:
    """The results, one by one; `tell` hears what is being measured."""
    done = 0

    def begin(claim: Claim) -> None:
        nonlocal done
        done += 1
        tell(f"{done}/{len(asked.claims)} {claim.title.told(asked.language)}")

    yield from run(asked.claims, seed=asked.seed, tell=begin)


def line(result: Result, language: str) -> Line:
    """A result in a few lines for the terminal."""
    verdict, claim = result.verdict, result.claim
    return Line.assemble(
        (f"{verdict.text.told(language)}  ", f"bold {STYLES[verdict]}"),
        (claim.title.told(language), "bold"),
        f"  {claim.name}\n   {claim.finding.told(language, result.found)}",
    )


def written(asked: Asked, results: Sequence[Result]) -> list[Path]:
    """The files that were asked for, each whole or not at all."""
    made = []
    for path, write in ((asked.page, page), (asked.notebook, notebook)):
        if path is not None:
            made.append(whole_text(path, write(results, asked.language)))
    return made
