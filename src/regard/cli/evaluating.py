"""`regard evaluate`: how good a run is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table

from regard.cli.options import Json, RunFolder, SkipBad
from regard.cli.terminal import shown, tell_bad
from regard.tasks import Run, Sources, Task, Trouble
from regard.tasks.sources import gather


def evaluate(
    folder: RunFolder,
    data: Annotated[
        list[str] | None, typer.Option(help="Held-out data; that of the run unless told otherwise.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(help="Tokens or elements of an input at most; as trained unless told.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """How good a run is, beside what simple means reach.

    regard evaluate runs/reviews --data test.csv
    """
    run = Run.open(folder)
    task = run.task if longest is None else _reading(run, longest)
    sources = Sources.of(run.about["sources"])
    sources = replace(sources, test=tuple(data or sources.test), skip_bad=skip_bad or sources.skip_bad)
    examples = gather(task, sources, run.recipe.seed)
    task.items(run.kit, examples.test, examples.bad)  # what cannot be taken is told here, with its place
    tell_bad(examples.bad)
    tell_figures(run, examples, as_json, task=task, keep=not data)


def _reading(run: Run, longest: int) -> Task:
    """The run's task with inputs of other lengths: a model may read more than it was trained on."""
    trained = getattr(run.task, "longest", None)
    if not isinstance(trained, int):
        raise Trouble(f"{run.folder}: a run of {run.task.name} is evaluated without --longest")
    most = (getattr(run.kit, "config", None) or {}).get("positions", trained)
    if not 0 < longest <= most:
        raise Trouble(f"--longest must be 1 to {most}, which is what the model of {run.folder} can read")
    return replace(run.task, longest=longest)  # type: ignore[type-var]


def tell_figures(run: Run, examples: Any, as_json: bool, *, task: Task | None = None, keep: bool = True) -> None:
    """Figures of a run beside those of its baselines, kept in run.json too where they are of its own data."""
    task = task or run.task
    model, step = run.model(frozen=True)
    figures = task.evaluate(model, run.kit, examples.test)
    baselines = task.baselines(run.kit, examples.train, examples.test)
    found = {
        "step": step, "minutes": run.minutes(), "trained_on": len(examples.train), "held_out": len(examples.test),
        "figures": figures, "baselines": baselines,
    } | ({"longest": task.longest} if hasattr(task, "longest") else {})  # fmt: skip
    if keep and not run.shipped:
        run.about["results"] = found
        run.note()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(f"{task.name}, {len(examples.test)} held out", f"{run.folder.name} (step {step})", *baselines)
    for name, value in figures.items():
        table.add_row(
            name, f"{value:.4g}", *(f"{each[name]:.4g}" if name in each else "" for each in baselines.values())
        )
    shown.print(table)
