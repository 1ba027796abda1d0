"""`regard evaluate`: how good a run is."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from regard.cli.options import Json, RunFolder, SkipBad
from regard.cli.terminal import print_json, quoted, shown, tell, tell_bad
from regard.tasks import Run, Task, Trouble
from regard.tasks.figures import Measured, measure
from regard.tasks.lock import Busy
from regard.tasks.sources import DataGone, Examples, gather_again, splits
from regard.tasks.trouble import Bad


def evaluate(
    folder: RunFolder,
    data: Annotated[list[str] | None, typer.Option(help="Test data. [default: the test rows of the run]")] = None,
    longest: Annotated[
        int | None, typer.Option(help="Tokens or elements of an input at most; as trained unless told.")
    ] = None,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """How good a run, or what `regard export` wrote of it, is on its test rows, compared with baselines.

    Baselines are trained on the data of the run. Where that is not there, --data is measured without them.

        regard evaluate runs/reviews
        regard evaluate runs/reviews --data test.csv
    """
    run = Run.open(folder)
    task = run.task if longest is None else _reading(run, longest)
    try:
        examples, baselines = gather_again(run, skip_bad=skip_bad), True
    except DataGone as error:
        if not data:
            raise
        tell(f"without baselines: {error}")
        examples, baselines = Examples([], [], [], Bad(skip=skip_bad)), False
    bad = examples.bad
    if data:
        bad = Bad(skip=bad.skip)
        examples = examples._replace(test=[row for source in data for row in task.read(source, bad)])
    tell_figures(run, examples, bad, as_json, task=task, keep=not data, baselines=baselines)
    tell_bad(bad)


def _reading(run: Run, longest: int) -> Task:
    """The run's task with inputs of other lengths: a model may read more than it was trained on."""
    trained = getattr(run.task, "longest", None)
    if not isinstance(trained, int):
        raise Trouble(f"{run.folder}: a run of {run.task.name} is evaluated without --longest")
    most = (getattr(run.kit, "config", None) or {}).get("positions", trained)
    if not 0 < longest <= most:
        raise Trouble(f"--longest must be 1 to {most}, which is what the model of {run.folder} can read")
    return replace(run.task, longest=longest)  # type: ignore[type-var]


def tell_figures(
    run: Run, examples: Examples, bad: Bad, as_json: bool, *, task: Task | None = None, keep: bool = True,
    baselines: bool = True,
) -> None:  # fmt: skip
    """Print the figures of a run next to those of its baselines; keep them in run.json where they are of its own data.

    bad: takes the test rows that the model cannot take. baselines: whether `examples` has the rows to train them on.
    """
    task = task or run.task
    model, step = run.model(frozen=True)
    # Baselines train on what the run trained on, which may be longer than what is measured, or shorter.
    longer = {"longest": max(run.task.longest, task.longest)} if hasattr(task, "longest") else {}  # type: ignore[attr-defined]
    baseline = replace(task, **longer)  # type: ignore[type-var]
    train = examples.train if baselines else None
    measured = measure(task, model, run.kit, train, examples.test, bad, baseline=baseline)
    rows = dict(run.about["rows"]) if measured.train is None else examples.rows() | {"train": measured.train}
    rows |= {"test": measured.test, "left_out": measured.left_out}
    chose = examples.test is examples.valid  # there are no others: they chose the weights, too
    found = {"step": step, "minutes": run.minutes(), "chose_weights": chose, "rows": rows}
    found |= {"figures": measured.figures, "baselines": measured.baselines}
    found |= {"longest": task.longest} if hasattr(task, "longest") else {}
    if as_json:
        print_json(found)
    else:
        _show(run, task, measured, rows, step, chose)
    if keep and not run.exported:
        try:
            run.keep_results(found)
        except (Busy, OSError) as error:
            tell(f"the figures are not kept in run.json: {error}")


def _show(run: Run, task: Task, measured: Measured, rows: dict[str, int], step: int, chose: bool) -> None:
    left_out = f", {measured.left_out:,} left out" if measured.left_out else ""
    table = Table(task.name, f"{quoted(run.folder.name)} (step {step})", *map(quoted, measured.baselines))
    table.title = f"{splits(rows, shared=chose)}{left_out}"
    table.caption = "The test rows also chose the weights." if chose else None
    for name, value in measured.figures.items():
        others = (f"{each[name]:.4g}" if name in each else "" for each in measured.baselines.values())
        table.add_row(quoted(name), f"{value:.4g}", *others)
    shown.print(table)
