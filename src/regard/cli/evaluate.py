"""`regard evaluate`: how good a run is."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from regard.cli.console import print_bad_rows, print_json, print_message, quoted, stdout
from regard.cli.options import Json, RunFolder, SkipBad
from regard.errors import BadRows
from regard.tasks import Run, Task, UserError
from regard.training.evaluation import Evaluation, evaluate_with_baselines
from regard.training.lock import RunLocked
from regard.training.sources import DataGone, Examples, reread_examples, splits


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
        examples, baselines = reread_examples(run, skip_bad=skip_bad), True
    except DataGone as error:
        if not data:
            raise
        print_message(f"without baselines: {error}")
        examples, baselines = Examples([], [], [], BadRows(skip=skip_bad)), False
    bad = examples.bad
    if data:
        bad = BadRows(skip=bad.skip)
        examples = examples._replace(test=[row for source in data for row in task.read(source, bad)])
    report_metrics(run, examples, bad, as_json, task=task, keep=not data, baselines=baselines)
    print_bad_rows(bad)


def _reading(run: Run, longest: int) -> Task:
    """The run's task with inputs of other lengths: a model may read more than it was trained on."""
    trained = getattr(run.task, "longest", None)
    if not isinstance(trained, int):
        raise UserError(f"{run.folder}: a run of {run.task.name} is evaluated without --longest")
    most = (getattr(run.processor, "config", None) or {}).get("positions", trained)
    if not 0 < longest <= most:
        raise UserError(f"--longest must be 1 to {most}, which is what the model of {run.folder} can read")
    return replace(run.task, longest=longest)  # type: ignore[type-var]


def report_metrics(
    run: Run, examples: Examples, bad: BadRows, as_json: bool, *, task: Task | None = None, keep: bool = True,
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
    evaluation = evaluate_with_baselines(task, model, run.processor, train, examples.test, bad, baseline=baseline)
    rows = dict(run.about["rows"]) if evaluation.train is None else examples.rows() | {"train": evaluation.train}
    rows |= {"test": evaluation.test, "left_out": evaluation.left_out}
    chose = examples.test is examples.validation  # there are no others: they chose the weights, too
    found = {"step": step, "minutes": run.minutes(), "chose_weights": chose, "rows": rows}
    found |= {"figures": evaluation.metrics, "baselines": evaluation.baselines}
    found |= {"longest": task.longest} if hasattr(task, "longest") else {}
    if as_json:
        print_json(found)
    else:
        _show(run, task, evaluation, rows, step, chose)
    if keep and not run.exported:
        try:
            run.keep_results(found)
        except (RunLocked, OSError) as error:
            print_message(f"the figures are not kept in run.json: {error}")


def _show(run: Run, task: Task, evaluation: Evaluation, rows: dict[str, int], step: int, chose: bool) -> None:
    left_out = f", {evaluation.left_out:,} left out" if evaluation.left_out else ""
    table = Table(task.name, f"{quoted(run.folder.name)} (step {step})", *map(quoted, evaluation.baselines))
    table.title = f"{splits(rows, shared=chose)}{left_out}"
    table.caption = "The test rows also chose the weights." if chose else None
    for name, value in evaluation.metrics.items():
        others = (f"{each[name]:.4g}" if name in each else "" for each in evaluation.baselines.values())
        table.add_row(quoted(name), f"{value:.4g}", *others)
    stdout.print(table)
