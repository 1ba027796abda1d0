"""`regard lab`: measure claims of the theory of attention."""

from __future__ import annotations

from pathlib import Path

from regard.cli import lab_report
from regard.cli.console import PipeSafeConsole, print_json, print_line, print_message, stderr
from regard.files import check_writable, write_text_atomically
from regard.tasks import UserError


def lab(
    names: list[str], out: Path | None, notebook: Path | None, language: str, seed: int, show: bool, as_json: bool
) -> None:
    """Measure claims and write the page and the notebook; with `show`, only list the claims."""
    try:
        request = lab_report.LabRequest.of(names, out, notebook, language, seed)
    except ValueError as error:
        raise UserError(f"{error}") from error
    if show:
        listed = [{"claim": claim.name, "title": claim.title.render(language)} for claim in request.claims]
        if as_json:
            print_json(listed)
            return
        for each in listed:
            print_line(f"{each['claim']:22} {each['title']}")
        return
    results, console = [], PipeSafeConsole(highlight=False)
    with stderr.status("") as status:
        for result in lab_report.run_claims(request, lambda line: status.update(line)):
            results.append(result)
            if not as_json:
                console.print(lab_report.format_result(result, language))
    if as_json:
        print_json([result.as_json(language) for result in results])
    for path in lab_report.write_files(request, results):
        print_message(str(path))


def write_calculator(names: list[str], out: Path) -> None:
    """Write the attention calculator."""
    from regard.lab.calculator import calculator

    if names:
        raise UserError(f"--calculator measures no claim; leave out {names[0]!r}")
    check_writable(out, suffixes=[".html"])
    print_message(str(write_text_atomically(out, calculator())))
