"""`regard lab`: the theory's claims, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import PipeSafeConsole, print_json, print_line, print_message, stderr
from regard.cli.options import Json
from regard.tasks import UserError


def lab(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Claims to measure; all if none.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; lab.html if all claims are measured.")
    ] = None,
    notebook: Annotated[Path | None, typer.Option(help="Also as a Jupyter notebook.")] = None,
    language: Annotated[str, typer.Option("--lang", help="en or zh.")] = "en",
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    show: Annotated[bool, typer.Option("--list", help="Only show what the claims are.")] = False,
    as_json: Json = False,
) -> None:
    """Measure what the theory says of attention, and write a page with formulas, pictures and verdicts.

    regard lab -o lab.html
    regard lab variance saturation
    regard lab --lang zh -o lab.html --notebook lab.ipynb
    """
    from regard.cli import lab_report

    try:
        request = lab_report.LabRequest.of(names or [], out, notebook, language, seed)
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
    results, patient = [], PipeSafeConsole(highlight=False)
    with stderr.status("") as status:
        for result in lab_report.run_claims(request, lambda line: status.update(line)):
            results.append(result)
            if not as_json:
                patient.print(lab_report.format_result(result, language))
    if as_json:
        print_json([result.as_json(language) for result in results])
    for path in lab_report.write_files(request, results):
        print_message(str(path))
