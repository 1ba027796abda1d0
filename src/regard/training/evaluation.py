"""The figures of a model next to those of its baselines, all measured on the same rows."""

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
    """Figures, and how many rows they are of.

    train: rows that the model and the baselines were trained on; none where there are no baselines.
    test: rows that model and baselines were measured on.
    left_out: test rows that were not measured on: the model cannot take them, or they repeat others (`embed`).
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
    """Measure a model and its baselines on the test rows that the model can take; others are bad.

    train: none where the data that the model was trained on is not there, and baselines are left out.
    baseline: the task that reads the training rows, where it is not the one that is measured.
    """
    baseline = baseline or task
    with stage("preparing test rows"):
        rows = task.evaluable_rows(processor, test, bad)
    if not rows:
        raise UserError("no test row is left to measure on; check the data, or --longest")
    with stage(f"evaluating {len(rows):,} test rows"):
        metrics = task.evaluate(model, processor, rows)
    left_out = len(test) - len(rows)
    if train is None:
        return Evaluation(None, len(rows), left_out, metrics, {})
    # Rows that training could not take raised there, unless they were to be left out.
    with stage("measuring baselines"):
        train = usable_rows(baseline, processor, train, BadRows(skip=True)) if bad.skip else list(train)
        return Evaluation(len(train), len(rows), left_out, metrics, baseline.baselines(processor, train, rows))
