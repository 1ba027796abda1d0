"""Runs and exported folders as predictors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from regard.data.readers import Row
from regard.errors import BadRows
from regard.predictors.predictor import Predictor
from regard.training.runs import Run
from regard.training.task import Prediction

SUFFIXES = {"audio": (".wav",)}  # by kind of output


def column_names(run: Run) -> list[str]:
    """Return the names of the columns in the data of a run."""
    return [getattr(run.task, name, "") or name for name in run.task.columns]


class RunPredictor(Predictor):
    """Predicts as the task of a run does. The model is loaded when it is first used."""

    def __init__(self, run: Run) -> None:
        task = run.task
        self.run, self.name = run, str(run.folder)
        self.kind = f"a run of {task.name}"  # type: ignore[misc]
        self.file_suffixes = SUFFIXES.get(task.output_kind, ())  # type: ignore[misc]
        self.columns, self.input_columns, self.input_kind = task.columns, task.input_columns, task.input_kind
        self.splits_at_tabs, self.output_kind, self.viewer_text = (
            task.splits_at_tabs,
            task.output_kind,
            task.viewer_text,
        )

    @cached_property
    def model(self) -> nn.Module:
        return self.run.model(frozen=True)[0]

    def column_names(self) -> list[str]:
        return column_names(self.run)

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        return self.run.task.read_inputs(source, bad)

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        return self.run.task.predict(self.model, self.run.processor, rows, bad)

    def name_tokens(self, record: Any, prediction: Prediction) -> None:
        self.run.task.name_tokens(self.model, self.run.processor, record, prediction)
