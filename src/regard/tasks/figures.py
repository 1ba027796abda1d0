"""The figures of a model next to those of its baselines, all measured on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from regard.tasks.data import Row
from regard.tasks.task import Figures, Kit, Task, usable
from regard.tasks.trouble import Bad, Trouble


class Measured(NamedTuple):
    """Figures, and how many rows they are of.

    trained_on: rows that the model and the baselines were trained on.
    held_out: rows that model and baselines were measured on.
    left_out: held-out rows that were not measured on: the model cannot take them, or they repeat others (`embed`).
    """

    trained_on: int
    held_out: int
    left_out: int
    figures: Figures
    baselines: dict[str, Figures]


def measure(
    task: Task, model: nn.Module, kit: Kit, train: Sequence[Row], test: Sequence[Row], bad: Bad, *,
    baseline: Task | None = None,
) -> Measured:  # fmt: skip
    """Measure a model and its baselines on the held-out rows that the model can take; others are bad.

    baseline: the task that reads the training rows, where it is not the one that is measured.
    """
    baseline = baseline or task
    rows = task.measured(kit, test, bad)
    if not rows:
        raise Trouble("no held-out row is left to measure on; check the data, or --longest")
    # Rows that training could not take raised there, unless they were to be left out.
    train = usable(baseline, kit, train, Bad(skip=True)) if bad.skip else list(train)
    figures, baselines = task.evaluate(model, kit, rows), baseline.baselines(kit, train, rows)
    return Measured(len(train), len(rows), len(test) - len(rows), figures, baselines)
