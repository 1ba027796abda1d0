"""What `regard lab` does with its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.text import Text as Line

from regard.files import check_writable, write_text_atomically
from regard.lab.claim import LANGUAGES, Claim, Result, Verdict
from regard.lab.notebook import notebook
from regard.lab.page import page
from regard.lab.runner import run, select_claims

STYLES = {Verdict.HOLDS: "green", Verdict.NEARLY: "yellow", Verdict.FALSE: "red"}


@dataclass(frozen=True)
class LabRequest:
    """What was asked for, found to be possible before minutes are spent on it."""

    claims: Sequence[Claim]
    page: Path | None
    notebook: Path | None
    language: str
    seed: int

    @staticmethod
    def of(names: Sequence[str], out: Path | None, notebook: Path | None, language: str, seed: int) -> LabRequest:
        if language not in LANGUAGES:
            raise ValueError(f"--lang must be {' or '.join(LANGUAGES)}, but is {language!r}")
        claims = select_claims(names)
        if out is None and not names:
            out = Path("lab.html")
        for path in (out, notebook):
            if path is not None:
                check_writable(path)
        needs = {"matplotlib", "jinja2", "latex2mathml", "pygments"} if out else set()
        needs |= {"matplotlib", "nbformat"} if notebook else set()
        if missing := sorted(name for name in needs if find_spec(name) is None):
            raise ValueError(f"the lab's page needs {', '.join(missing)}: pip install 'regard[lab]'")
        return LabRequest(claims, out, notebook, language, seed)


def run_claims(request: LabRequest, report: Callable[[str], None]) -> Iterator[Result]:
    """The results, one by one; `report` hears what is being measured."""
    done = 0

    def report_start(claim: Claim) -> None:
        nonlocal done
        done += 1
        report(f"{done}/{len(request.claims)} {claim.title.render(request.language)}")

    yield from run(request.claims, seed=request.seed, on_start=report_start)


def format_result(result: Result, language: str) -> Line:
    """A result in a few lines for the terminal."""
    verdict, claim = result.verdict, result.claim
    return Line.assemble(
        (f"{verdict.text.render(language)}  ", f"bold {STYLES[verdict]}"),
        (claim.title.render(language), "bold"),
        f"  {claim.name}\n   {claim.finding.render(language, result.found)}",
    )


def write_files(request: LabRequest, results: Sequence[Result]) -> list[Path]:
    """The files that were asked for, each whole or not at all."""
    paths = []
    for path, write in ((request.page, page), (request.notebook, notebook)):
        if path is not None:
            paths.append(write_text_atomically(path, write(results, request.language)))
    return paths
