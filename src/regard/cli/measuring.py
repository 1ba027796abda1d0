"""`regard lab`, `regard check` and `regard info`: what holds of attention, and of this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Json
from regard.cli.terminal import Patient, print_json, print_line, shown, tell, told
from regard.tasks import Trouble


def info(as_json: Json = False) -> None:
    """Versions, engines, instruction set and threads: what a bug report needs.

    regard info
    """
    from regard.info import info as about

    found = about()
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        print_line(f"{name:16} {value}")


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
    from regard.lab import command

    try:
        asked = command.Asked.of(names or [], out, notebook, language, seed)
    except ValueError as error:
        raise Trouble(f"{error}") from error
    if show:
        listed = [{"claim": claim.name, "title": claim.title.told(language)} for claim in asked.claims]
        if as_json:
            print_json(listed)
            return
        for each in listed:
            print_line(f"{each['claim']:22} {each['title']}")
        return
    results, patient = [], Patient(highlight=False)
    with told.status("") as status:
        for result in command.measured(asked, lambda line: status.update(line)):
            results.append(result)
            if not as_json:
                patient.print(command.line(result, language))
    if as_json:
        print_json([result.as_json(language) for result in results])
    for path in command.written(asked, results):
        tell(str(path))


def check(
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="package.module:function or a name of --list; the engines of this installation unless given.",
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="PROPERTY", help="Only this property.")] = None,
    names: Annotated[bool, typer.Option("--list", help="What is demanded, and which targets have names.")] = False,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JUnit XML.")] = None,
) -> None:
    """Whether an attention is one: definition, masks, gradients, dropout, memory.

    Ends with 0 if everything holds, 1 if something does not, 2 if it could not be checked.

    regard check
    regard check --target torch.nn.functional:scaled_dot_product_attention --only nan-leaks
    """
    from regard.check import command

    if names:
        command.listed(shown, as_json)
        return
    form = "json" if as_json else "markdown" if markdown else "table"
    raise typer.Exit(command.run(shown, told, targets or [], only or [], form=form, junit=junit))
