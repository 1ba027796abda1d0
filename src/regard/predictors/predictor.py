"""The interface of predictors: a model with all that it needs to turn inputs into outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from regard.data.readers import Row, read_rows
from regard.errors import BadRows, UserError
from regard.training.task import Metrics, Prediction, Task


@dataclass(frozen=True)
class PredictOptions:
    """Options of `regard predict`; None means the default of the model.

    chat: use the chat template of the model. system: the system message. language: of the speech, such as "en".
    translate: translate speech to English. timestamps: print when each part is spoken. threshold: lowest score of an
    object that is reported. labels: texts to compare images with, separated by commas.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    chat: bool | None = None
    system: str | None = None
    language: str | None = None
    translate: bool | None = None
    timestamps: bool | None = None
    threshold: float | None = None
    labels: str | None = None

    def names(self) -> list[str]:
        """Return the names of the options that are set."""
        return [each.name for each in fields(self) if getattr(self, each.name) is not None]


class Predictor(ABC):
    """A model and how to predict with it. `columns` to `viewer_text` are those of `regard.training.task.Task`.

    kind: what the model does, for messages. accepts: the options that apply to it.
    examines: what `regard view` captures: the "prediction", or one forward call over a "text" or an "image".
    longest: the most tokens of a text that `examines` is about, if there is a limit.
    streams: whether `stream` prints outputs while they are generated.
    file_suffixes: files that `write_file` can make of a prediction.
    """

    kind: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]] = ()
    streams: ClassVar[bool] = False
    file_suffixes: ClassVar[tuple[str, ...]] = ()
    columns: tuple[str, ...] = ("text",)
    input_columns: tuple[str, ...] = ()
    input_kind: str = "text"
    splits_at_tabs: bool = False
    output_kind: str = "text"
    viewer_text: str = Task.viewer_text
    examines: str = "prediction"
    longest: int | None = None

    name: str
    tokenizer: Any = None
    model: Any  # an nn.Module in eval mode
    options: PredictOptions = PredictOptions()

    def configure(self, options: PredictOptions) -> None:
        """Set the options; raise if one does not apply to this model."""
        for name in options.names():
            if name not in self.accepts:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} does not apply to {self.name}, which is {self.kind}; leave it out")
        self.options = options

    def column_names(self) -> list[str]:
        """Return the names of `columns` in a table."""
        return list(self.columns)

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """Read the rows of a source, to evaluate on."""
        return list(read_rows(source, dict.fromkeys(self.columns, ""), bad, only=self.columns))

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        """Read the inputs of a source; columns to predict may be missing."""
        columns = dict.fromkeys(self.columns, "")
        return read_rows(source, columns, bad, only=self.input_columns or self.columns[:1])

    @abstractmethod
    def predict(self, rows: Sequence[Row], bad: BadRows) -> Iterator[Prediction]:
        """Yield predictions in order, with the places of the rows; inputs that cannot be used are added to `bad`."""

    def examine(self, row: Row, bad: BadRows) -> Prediction | None:
        """Predict one input for the viewer, which captures the last forward call; None if the input is bad."""
        return next(iter(list(self.predict([row], bad))), None)

    def stream(self, row: Row, bad: BadRows, emit: Callable[[str], object]) -> None:
        """Call `emit` with pieces of the output for one row as they are generated, if `streams`."""
        raise NotImplementedError

    def write_file(self, prediction: Prediction, suffix: str) -> bytes:
        """Return the content of an output file with one of `file_suffixes`."""
        return prediction.file

    def evaluate(self, rows: Sequence[Row], bad: BadRows) -> Metrics:
        """Compute metrics on rows of `read`; rows that cannot be processed are added to `bad`."""
        raise UserError(f"{self.name}: is {self.kind}, which has no metrics; use regard predict")

    def name_tokens(self, record: Any, prediction: Prediction) -> None:  # noqa: B027
        """Name the tokens of a record of `regard.view`."""
