"""All commands, in the order in which `regard --help` lists them."""

from __future__ import annotations

import os
import sys

import typer

from regard.cli.check import check
from regard.cli.console import print_error
from regard.cli.evaluate import evaluate
from regard.cli.info import info
from regard.cli.lab import lab
from regard.cli.plan import plan
from regard.cli.predict import export, predict
from regard.cli.stages import reporting_stages
from regard.cli.train import list_tasks, resume, training
from regard.cli.view import serve, view
from regard.tasks import UserError
from regard.training.runs import is_disk_full

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown", add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, evaluate and use models of attention.\n\n    regard train translate --data pairs.tsv --out runs/en-fr",
)  # fmt: skip
app.command("tasks")(list_tasks)
for each in (resume, evaluate, predict, export, view, serve, info, lab, check, plan):
    app.command()(each)
app.add_typer(training, name="train")


def main() -> None:
    """The command; what the user can mend is told in one line."""
    for word in sys.argv[1:]:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python keeps bytes that are no UTF-8
            came = os.fsencode(word).decode("utf-8", "backslashreplace")
            print_error(
                UserError(f"expected UTF-8 on the command line, got {came}; convert the text, or rename the file")
            )
            sys.exit(2)
    try:
        with reporting_stages():
            app()
    except Exception as error:
        has_filename = isinstance(error, OSError) and error.filename is not None
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch raises a RuntimeError
            error = UserError("there is not enough memory; give smaller inputs, or use a machine that has more")
        elif not (isinstance(error, UserError) or has_filename or is_disk_full(error)):
            raise
        print_error(error)
        sys.exit(1)
