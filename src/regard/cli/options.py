"""Words of the command line that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")]
Context = Annotated[Path | None, typer.Option(help="A text file that the inputs are questions about.")]
Lang = Annotated[str, typer.Option(help="Of the page: en or zh.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run or its export.", show_default=False)]
