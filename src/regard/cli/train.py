"""`regard tasks`, `regard train` and `regard resume`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from regard.cli.console import print_bad_rows, print_json, print_message, stderr, stdout
from regard.cli.evaluate import report_metrics
from regard.cli.options import Json, RunFolder
from regard.errors import BadRows
from regard.tasks import Recipe, Run, Sources, Task, UserError, create_run, tasks, train

training = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown",
    help="Train a model of a task on your data.\n\n    regard train classify --data reviews.csv --out runs/reviews",
)  # fmt: skip


def list_tasks(as_json: Json = False) -> None:
    """What can be trained, and what its data looks like.

    regard tasks
    """
    known = tasks()
    if as_json:
        about = {
            name: {"does": kind.description, "columns": kind.columns, "takes": kind.input_kind, "example": kind.example}
            for name, kind in known.items()
        }
        print_json(about)
        return
    table = Table("task", "does", "columns", "a file of it", show_lines=True)
    for name, kind in known.items():
        table.add_row(
            f"[bold]{name}[/]", kind.description, ", ".join(kind.columns), escape(kind.example.replace("\t", " → "))
        )
    stdout.print(table)
    stdout.print(
        "Data: TSV (→ is a tab), CSV with a header, JSONL or text, also .gz .xz .bz2; or a dataset of the hub."
    )


def _train_command(kind: type[Task]) -> Callable[..., None]:
    """The command that trains a task: its options are the fields of the task and of the recipe."""

    def command(**options: Any) -> None:
        def part(of: Any) -> dict[str, Any]:
            return {each.name: options[each.name] for each in fields(of)}

        held_out = kind.held_out if options["held_out"] is None else options["held_out"]
        if not options["data"] and kind.data:
            options["data"] = [kind.data]
        data, validation, test = (tuple(options[name] or ()) for name in ("data", "validation", "test"))
        sources = Sources(data, validation, test, held_out, options["skip_bad"])
        try:
            task, recipe = kind(**part(kind)), Recipe(**part(Recipe))
        except ValueError as error:
            raise UserError(f"{error}") from error
        run, examples = create_run(options["out"], task, recipe, sources)
        _train(run, examples, options["as_json"])

    def option(name: str, annotation: Any, default: Any, help: str, panel: str, *flags: str) -> inspect.Parameter:
        made = typer.Option(*flags, help=help, rich_help_panel=panel)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, made]
        )

    unsaid = f" [default: {kind.data}]" if kind.data else ""
    parameters = [
        option("data", list[str] | None, None, f"Files or a dataset of the hub, to train on.{unsaid}", "Data"),
        option("validation", list[str] | None, None, "Files for validation, to choose the best weights by.", "Data"),
        option("test", list[str] | None, None, "Files for the test, to measure on; without, --validation.", "Data"),
        option(
            "held_out",
            int | None,
            None,
            f"Rows of the data for the test, where no file is given; half as many are for validation. "
            f"[default: {kind.held_out}]",
            "Data",
        ),
        option("skip_bad", bool, False, "Count bad lines and go on.", "Data", "--skip-bad"),
        option("out", Path, inspect.Parameter.empty, "The folder of the run.", "Data"),
        option("as_json", bool, False, "Print the figures as JSON.", "Data", "--json"),
    ]
    for panel, of, defaults in (("Model", kind, None), ("Training", Recipe, kind.recipe)):
        for each in fields(of):  # type: ignore[arg-type]
            default = each.default if defaults is None else getattr(defaults, each.name)
            words = each.metadata["help"][0].upper() + each.metadata["help"][1:] + "."
            parameters.append(option(each.name, type(default), default, words, panel))
    columns = " and ".join(kind.columns)
    about = kind.description[0].upper() + kind.description[1:]
    command.__doc__ = f"""{about}.{f" Data has {columns}." if columns else ""}

        regard train {kind.name} --data FILE --out runs/mine
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


for _name, _kind in tasks().items():
    training.command(_name)(_train_command(_kind))


def resume(
    folder: RunFolder,
    shard: Annotated[
        str | None, typer.Option(help="What processes share: data or fsdp; as before unless told.")
    ] = None,
    sequence_ranks: Annotated[
        int | None, typer.Option(help="Processes that share one sequence; as before unless told.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run, from its last checkpoint, by any number of processes.

    regard resume runs/reviews
    """
    run = Run.open(folder)
    before = run.recipe
    try:
        run.recipe = replace(
            before, shard=shard or before.shard, sequence_ranks=sequence_ranks or before.sequence_ranks
        )
    except ValueError as error:
        raise UserError(f"{error}") from error
    _train(run, None, as_json)


def _train(run: Run, examples: Any, as_json: bool) -> None:
    """Train to the end, then tell how good it is."""
    from regard.training.progress_bar import ProgressBar

    with ProgressBar(stderr, run) as bar:
        progress = train(run, examples, bar)
    if not bar.main:
        return
    if not progress.done:
        print_message(f"Stopped and saved at step {progress.step}. Go on with: regard resume {run.folder}")
        raise typer.Exit(130)
    if bar.examples is not None:
        print_bad_rows(bar.examples.bad)
        report_metrics(run, bar.examples, BadRows(skip=bar.examples.bad.skip), as_json)
