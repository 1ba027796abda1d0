"""Evaluation of a model and its baselines on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from regard.data.processor import Processor
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.progress import stage
from regard.training.task import Metrics, Task, usable_rows


class Evaluation(NamedTuple):
    """Metrics, and the numbers of rows behind them.

    train: training rows of the baselines; None without baselines.
    test: rows that model and baselines were evaluated on.
    left_out: test rows not evaluated: the model cannot process them, or they repeat others (`embed`).
    """

    train: int | None
    test: int
    left_out: int
    metrics: Metrics
    baselines: dict[str, Metrics]


def evaluate_with_baselines(
    task: Task,
    model: nn.Module,
    processor: Processor,
    train: Sequence[Row] | None,
    test: Sequence[Row],
    bad: BadRows,
    *,
    baseline: Task | None = None,
) -> Evaluation:
    """Evaluate a model and its baselines on the test rows that the model can process; others are bad.

    train: None if the training data is not available; baselines are left out then.
    baseline: the task that reads the training rows, if it differs from `task`.
    """
    baseline = baseline or task
    with stage("preparing test rows"):
        rows = task.evaluable_rows(processor, test, bad)
    if not rows:
        raise UserError("no test row is left to evaluate on; check the data, or --longest")
    with stage(f"evaluating {len(rows):,} test rows"):
        metrics = task.evaluate(model, processor, rows)
    left_out = len(test) - len(rows)
    if train is None:
        return Evaluation(None, len(rows), left_out, metrics, {})
    # Without `skip`, bad training rows raised before training.
    with stage("evaluating baselines"):
        train = usable_rows(baseline, processor, train, BadRows(skip=True)) if bad.skip else list(train)
        return Evaluation(len(train), len(rows), left_out, metrics, baseline.baselines(processor, train, rows))
