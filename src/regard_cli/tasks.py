"""`regard tasks`: the tasks that can be trained, and the data that each expects."""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from regard_cli.declared_tasks import declared_recipe, declared_tasks


def list_tasks(
    name: Annotated[str | None, typer.Argument(metavar="TASK", help="Show the data and defaults of one task.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tasks that can be trained, or describe one of them.

    regard tasks
    regard tasks translate
    """
    tasks = declared_tasks()
    if name is not None and name not in tasks:
        near = difflib.get_close_matches(name, tasks)
        hint = f"did you mean {near[0]}?" if near else "`regard tasks` lists them"
        raise typer.BadParameter(f"there is no task {name!r}; {hint}", param_hint="TASK")
    if as_json:
        about = {each: _as_json(task) for each, task in tasks.items() if name in (None, each)}
        print(json.dumps(about, indent=1))
        return
    stdout = Console(highlight=False)
    if name is not None:
        _describe(stdout, tasks[name])
        return
    width = max(map(len, tasks))
    for each, task in tasks.items():
        line = Text.assemble((f"{each:{width}}", "bold"), f"  {task.description}")
        line.truncate(stdout.width, overflow="ellipsis")
        stdout.print(line)
    stdout.print("\nregard tasks TASK          shows the data that a task expects and its defaults")
    stdout.print("regard train TASK --help   shows all options")


def _as_json(task: type[Any]) -> dict[str, Any]:
    return {
        "description": task.description, "columns": task.columns, "input": task.input_kind, "example": task.example
    }  # fmt: skip


def _describe(stdout: Console, task: type[Any]) -> None:
    stdout.print(f"[bold]{task.name}[/]: {escape(task.description)}")
    if task.columns:
        stdout.print(f"\nColumns: {', '.join(task.columns)}")
    stdout.print("\nExample of the data (→ is a tab):")
    for line in task.example.splitlines():
        stdout.print(f"    {escape(line)}".replace("\t", " → "), soft_wrap=True)
    stdout.print(
        "Data is TSV, CSV with a header, JSONL or text, also compressed (.gz .xz .bz2);\nor a dataset of the hub."
    )
    model = {each.name: each.default for each in fields(task) if each.name not in task.columns}
    recipe = {each.name: getattr(task.recipe, each.name) for each in fields(declared_recipe())}
    for title, values in (("Model", model), ("Training", recipe)):
        options = (f"--{key.replace('_', '-')} {value}" for key, value in values.items() if value != "")
        stdout.print(f"\n{title} defaults: {escape(', '.join(options))}")
    stdout.print(f"\nregard train {task.name} --data FILE --out runs/mine", soft_wrap=True)
