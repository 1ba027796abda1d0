"""`regard lab`, `regard check` and `regard info`: what holds of attention, and of this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.console import stderr, stdout
from regard.cli.options import Json


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
    from regard.cli import check_report

    if names:
        check_report.list_properties(stdout, as_json)
        return
    form = "json" if as_json else "markdown" if markdown else "table"
    raise typer.Exit(check_report.run(stdout, stderr, targets or [], only or [], form=form, junit=junit))
