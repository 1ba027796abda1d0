"""`regard lab`: check the request, run the claims, format and write the results."""

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

STYLES = {Verdict.HOLDS: "green", Verdict.NEARLY: "yellow", Verdict.FALSE: "red", Verdict.UNDECIDED: "dim"}


@dataclass(frozen=True)
class LabRequest:
    """A request that has been checked, so that no error follows minutes of measuring."""

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
        for path, suffix in ((out, ".html"), (notebook, ".ipynb")):
            if path is not None:
                check_writable(path, suffixes=[suffix])
        needs = {"matplotlib", "jinja2", "latex2mathml", "pygments"} if out else set()
        needs |= {"matplotlib", "nbformat"} if notebook else set()
        if missing := sorted(name for name in needs if find_spec(name) is None):
            raise ValueError(f"the lab's page needs {', '.join(missing)}: pip install 'regard[lab]'")
        return LabRequest(claims, out, notebook, language, seed)


def run_claims(request: LabRequest, report: Callable[[str], None]) -> Iterator[Result]:
    """Yield the results one by one. report: called with the title of each claim before it is measured."""
    done = 0

    def report_start(claim: Claim) -> None:
        nonlocal done
        done += 1
        report(f"{done}/{len(request.claims)} {claim.title.render(request.language)}")

    yield from run(request.claims, seed=request.seed, on_start=report_start)


def format_result(result: Result, language: str) -> Line:
    """Format a result as a few lines for the terminal."""
    verdict, claim = result.verdict, result.claim
    return Line.assemble(
        (f"{verdict.text.render(language)}  ", f"bold {STYLES[verdict]}"),
        (claim.title.render(language), "bold"),
        f"  {claim.name}\n   {result.sentence(language)}",
        *((f"\n   - {each.render(language)}", "dim") for each in result.judgements),
    )


def write_files(request: LabRequest, results: Sequence[Result]) -> list[Path]:
    """Write the requested files, each atomically; return their paths."""
    paths = []
    for path, write in ((request.page, page), (request.notebook, notebook)):
        if path is not None:
            paths.append(write_text_atomically(path, write(results, request.language)))
    return paths
