"""`regard train` and `regard resume`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from regard.cli.console import print_bad_rows, print_message, stderr
from regard.cli.evaluate import report_metrics
from regard.errors import BadRows
from regard.tasks import Recipe, Run, Sources, UserError, create_run, tasks, train


def train_task(name: str, options: Mapping[str, Any]) -> None:
    """Create a run of the task `name` and train it. options: those of the command, by parameter name."""
    kind = tasks()[name]

    def values(of: Any) -> dict[str, Any]:
        return {each.name: options[each.name] for each in fields(of)}

    held_out = kind.held_out if options["held_out"] is None else options["held_out"]
    data = options["data"] or ([kind.data] if kind.data else [])
    sources = Sources(
        tuple(data), tuple(options["validation"] or ()), tuple(options["test"] or ()), held_out, options["skip_bad"]
    )
    try:
        task, recipe = kind(**values(kind)), Recipe(**values(Recipe))
    except ValueError as error:
        raise UserError(f"{error}") from error
    run, examples = create_run(options["out"], task, recipe, sources)
    _train(run, examples, options["as_json"])


def resume(folder: Path, shard: str | None, sequence_ranks: int | None, as_json: bool) -> None:
    """Resume a run from its last checkpoint."""
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
    """Train to the end, then print the metrics."""
    from regard.training.progress_bar import ProgressBar

    with ProgressBar(stderr, run) as bar:
        progress = train(run, examples, bar)
    if not bar.main:
        return
    if not progress.done:
        print_message(f"Stopped and saved at step {progress.step}. Resume with: regard resume {run.folder}")
        raise typer.Exit(130)
    if bar.examples is not None:
        print_bad_rows(bar.examples.bad)
        report_metrics(run, bar.examples, BadRows(skip=bar.examples.bad.skip), as_json)
