"""The figures of a model next to those of its baselines, all measured on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from regard.tasks.data import Row
from regard.tasks.stages import stage
from regard.tasks.task import Figures, Kit, Task, usable
from regard.tasks.trouble import Bad, Trouble


class Measured(NamedTuple):
    """Figures, and how many rows they are of.

    train: rows that the model and the baselines were trained on; none where there are no baselines.
    test: rows that model and baselines were measured on.
    left_out: test rows that were not measured on: the model cannot take them, or they repeat others (`embed`).
    """

    train: int | None
    test: int
    left_out: int
    figures: Figures
    baselines: dict[str, Figures]


def measure(
    task: Task, model: nn.Module, kit: Kit, train: Sequence[Row] | None, test: Sequence[Row], bad: Bad, *,
    baseline: Task | None = None,
) -> Measured:  # fmt: skip
    """Measure a model and its baselines on the test rows that the model can take; others are bad.

    train: none where the data that the model was trained on is not there, and baselines are left out.
    baseline: the task that reads the training rows, where it is not the one that is measured.
    """
    baseline = baseline or task
    with stage("preparing test rows"):
        rows = task.measured(kit, test, bad)
    if not rows:
        raise Trouble("no test row is left to measure on; check the data, or --longest")
    with stage(f"evaluating {len(rows):,} test rows"):
        figures = task.evaluate(model, kit, rows)
    left_out = len(test) - len(rows)
    if train is None:
        return Measured(None, len(rows), left_out, figures, {})
    # Rows that training could not take raised there, unless they were to be left out.
    with stage("measuring baselines"):
        train = usable(baseline, kit, train, Bad(skip=True)) if bad.skip else list(train)
        return Measured(len(train), len(rows), left_out, figures, baseline.baselines(kit, train, rows))
