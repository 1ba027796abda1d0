"""`regard evaluate`: measure a run and its baselines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.table import Table

from regard.cli.console import print_bad_rows, print_json, print_message, quote_markup, stdout
from regard.errors import BadRows
from regard.predictors import find_run, open_model
from regard.progress import stage
from regard.tasks import Run, Task, UserError
from regard.training.evaluation import Evaluation, evaluate_with_baselines
from regard.training.lock import RunLocked
from regard.training.sources import DataGone, Examples, reread_examples, splits


def evaluate(name: str, data: list[str] | None, longest: int | None, skip_bad: bool, as_json: bool) -> None:
    """Print the metrics of a run on its test rows or `data`, compared with baselines, or those of a checkpoint."""
    run = find_run(name)
    if run is None:
        _evaluate_checkpoint(name, data, longest, skip_bad, as_json)
        return
    task = run.task if longest is None else _with_longest(run, longest)
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


def _evaluate_checkpoint(name: str, data: list[str] | None, longest: int | None, skip_bad: bool, as_json: bool) -> None:
    """Print the metrics of a checkpoint on `data`."""
    predictor = open_model(name)
    if not data:
        what = "a text file" if predictor.columns == ("text",) else f"a table with {' and '.join(predictor.columns)}"
        raise UserError(f"{name}: is {predictor.kind}, not a run with test rows of its own; give {what} with --data")
    if longest is not None:
        raise UserError(f"--longest applies to runs; {name} is {predictor.kind}, leave it out")
    bad = BadRows(skip=skip_bad)
    with stage("reading data"):
        rows = [row for source in data for row in predictor.read(source, bad)]
    with stage("evaluating"):
        metrics = predictor.evaluate(rows, bad)
    if as_json:
        print_json({"metrics": metrics, "left_out": bad.count})
    else:
        table = Table(predictor.kind.removeprefix("a ").removeprefix("an "), quote_markup(Path(name).name))
        for metric, value in metrics.items():
            table.add_row(quote_markup(metric), f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
        stdout.print(table)
    print_bad_rows(bad)


def _with_longest(run: Run, longest: int) -> Task:
    """The run's task with another maximum length; a model may read longer inputs than those it was trained on."""
    trained = getattr(run.task, "longest", None)
    if not isinstance(trained, int):
        raise UserError(f"{run.folder}: the task {run.task.name} does not support --longest; leave it out")
    most = (getattr(run.processor, "config", None) or {}).get("positions", trained)
    if not 0 < longest <= most:
        raise UserError(f"--longest must be 1 to {most}, the positions of the model of {run.folder}, but is {longest}")
    return replace(run.task, longest=longest)  # type: ignore[type-var]


def report_metrics(
    run: Run, examples: Examples, bad: BadRows, as_json: bool, *, task: Task | None = None, keep: bool = True,
    baselines: bool = True,
) -> None:  # fmt: skip
    """Print the metrics of a run and of its baselines.

    bad: collects the test rows that the model cannot read.
    keep: store the metrics in run.json, if they were measured on the run's own data.
    baselines: whether `examples` has the training rows that baselines need.
    """
    task = task or run.task
    model, step = run.model(frozen=True)
    # Baselines train on the rows of the run, which may be longer or shorter than those that are measured.
    longer = {"longest": max(run.task.longest, task.longest)} if hasattr(task, "longest") else {}  # type: ignore[attr-defined]
    baseline = replace(task, **longer)  # type: ignore[type-var]
    train = examples.train if baselines else None
    evaluation = evaluate_with_baselines(task, model, run.processor, train, examples.test, bad, baseline=baseline)
    rows = dict(run.about["rows"]) if evaluation.train is None else examples.rows() | {"train": evaluation.train}
    rows |= {"test": evaluation.test, "left_out": evaluation.left_out}
    chose = examples.test is examples.validation  # without other rows, these also chose the weights
    results = {"step": step, "minutes": run.minutes(), "chose_weights": chose, "rows": rows}
    results |= {"metrics": evaluation.metrics, "baselines": evaluation.baselines}
    results |= {"longest": task.longest} if hasattr(task, "longest") else {}
    if as_json:
        print_json(results)
    else:
        _print_table(run, task, evaluation, rows, step, chose)
    if keep and not run.exported:
        try:
            run.keep_results(results)
        except (RunLocked, OSError) as error:
            print_message(f"the metrics are not stored in run.json: {error}")


def _print_table(run: Run, task: Task, evaluation: Evaluation, rows: dict[str, int], step: int, chose: bool) -> None:
    left_out = f", {evaluation.left_out:,} left out" if evaluation.left_out else ""
    table = Table(task.name, f"{quote_markup(run.folder.name)} (step {step})", *map(quote_markup, evaluation.baselines))
    table.title = f"{splits(rows, shared=chose)}{left_out}"
    table.caption = "The test rows also chose the weights." if chose else None
    for name, value in evaluation.metrics.items():
        others = (f"{each[name]:.4g}" if name in each else "" for each in evaluation.baselines.values())
        table.add_row(quote_markup(name), f"{value:.4g}", *others)
    stdout.print(table)
