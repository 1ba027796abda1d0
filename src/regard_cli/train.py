"""`regard train TASK`: one command for every task, with the options of the task and of its recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from regard_cli.declared_tasks import declared_recipe, declared_tasks
from regard_cli.paths import check_data


class TrainGroup(TyperGroup):
    """The group `regard train`, which builds its commands only when they are needed."""

    @property
    def commands(self) -> dict[str, Any]:
        return self._task_commands

    @commands.setter
    def commands(self, commands: object) -> None:
        """Ignore the empty dict of the base class."""

    @cached_property
    def _task_commands(self) -> dict[str, Any]:
        app = typer.Typer(rich_markup_mode="rich", add_completion=False)
        app.callback()(lambda: None)
        for name, task in declared_tasks().items():
            app.command(name)(train_command(name, task))
        return dict(typer.main.get_group(app).commands)


def train_command(name: str, task: type[Any]) -> Callable[..., None]:
    """The command that trains a task: its options are the fields of the task and of the recipe."""

    def command(**options: Any) -> None:
        check_data(source for key in ("data", "validation", "test") for source in options[key] or ())
        from regard.cli.stages import reporting_stages
        from regard.cli.train import train_task

        with reporting_stages():
            train_task(name, options)

    parameters = [
        _option("data", list[str] | None, None, "Files or a dataset of the hub to train on.", "Data",
                show_default=task.data or False),
        _option("validation", list[str] | None, None, "Files for validation, which choose the best weights.", "Data"),
        _option("test", list[str] | None, None, "Files to measure the final metrics on.", "Data",
                show_default="those of --validation"),
        _option("held_out", int | None, None, "Rows of the data to hold out for the test, if no file is given; half as "
                "many are held out for validation.", "Data", show_default=str(task.held_out)),
        _option("skip_bad", bool, False, "Count bad lines and continue.", "Data", "--skip-bad"),
        _option("out", Path, inspect.Parameter.empty, "The folder of the run.", "Data"),
        _option("as_json", bool, False, "Print the metrics as JSON.", "Data", "--json"),
    ]  # fmt: skip
    for panel, declared, defaults in (("Model", task, None), ("Training", declared_recipe(), task.recipe)):
        for each in fields(declared):
            default = each.default if defaults is None else getattr(defaults, each.name)
            text = each.metadata["help"]
            parameters.append(_option(each.name, type(default), default, f"{text[0].upper()}{text[1:]}.", panel))
    columns = f"\n\nColumns of the data: {', '.join(task.columns)}." if task.columns else ""
    command.__doc__ = (
        f"{task.description[0].upper()}{task.description[1:]}.{columns}\n\n"
        f"regard train {name} --data FILE --out runs/mine"
    )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _option(
    name: str, annotation: Any, default: Any, help: str, panel: str, *flags: str, show_default: bool | str = True
) -> inspect.Parameter:
    option = typer.Option(*flags, help=escape(help), rich_help_panel=panel, show_default=show_default)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )
