"""Models without a head: their attention can be viewed, but they predict nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.predictors.checkpoint import Checkpoint
from regard.predictors.predictor import Predictor
from regard.training.task import Prediction


class ViewOnly(Predictor):
    """A model whose outputs are hidden states."""

    kind: ClassVar[str] = "a model without a head"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.name, self.model, self.checkpoint = checkpoint.name, checkpoint.model, checkpoint
        self.input_kind = self.examines = "image" if hasattr(self.model.config, "grid") else "text"
        if self.input_kind == "text":
            self.tokenizer = checkpoint.tokenizer

    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        raise UserError(
            f"{self.name}: {type(self.model).__name__} has no head, so it predicts nothing; regard view shows its "
            "attention, and rg.load gives its hidden states"
        )
