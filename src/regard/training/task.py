"""The interface of tasks. A new task is one file in `regard.tasks`: a frozen dataclass that inherits from `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import Row, read_rows
from regard.data.splits import normalize_text, split
from regard.errors import BadRows
from regard.field_types import check_maximum, check_minimum, check_options
from regard.nn import Packed
from regard.training.recipe import Recipe

if TYPE_CHECKING:
    from regard.training.onnx_graphs import Graph


@dataclass(frozen=True)
class Batch:
    """One batch of a training step. The types of inputs and targets are up to the task."""

    inputs: Any
    targets: Any
    tokens: int  # without padding, for tokens/s
    count: int  # denominator of the mean loss


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors within a value to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Packed):
        return Packed(value.values.to(device), value.lengths)
    if isinstance(value, Batch):
        return replace(value, inputs=to_device(value.inputs, device), targets=to_device(value.targets, device))
    if isinstance(value, tuple | list):
        parts = [to_device(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Dataset(Protocol):
    """Encoded examples. `sizes` (n,) are their tokens, `places` their origins in the data."""

    sizes: np.ndarray
    places: Sequence[str]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        """Batch the chosen examples. Only `random` may be used for randomness, so that a resumed run draws the same."""
        ...


class Prediction(NamedTuple):
    """The output of the model for one input. The score is a probability, a cosine similarity, or None."""

    input: str
    output: str
    score: float | None
    more: Mapping[str, Any] = MappingProxyType({})  # alternatives, vectors, boxes: for --json
    note: str = ""  # shown next to the output, such as the speed
    file: bytes = b""  # output that is not text, such as audio
    place: str = ""  # origin of the input


Metrics = dict[str, float]


class Task(ABC):
    """Reading data, training, evaluation and prediction. The fields of a task are options of `regard train`.

    name, description, example: name on the command line, one-line description, a few lines of example data.
    columns: values of a row, in order; each is also a field of the task that selects the column in a file.
    input_columns: the columns that the model predicts from; by default the first.
    input_kind: input of `regard predict`: "text", or "image" or "audio" for paths of files.
    splits_at_tabs: whether a tab in an input text separates its parts, such as question and context.
    output_kind: output of `regard predict`: "text", or "audio" for files.
    viewer_text: the initial text of the viewer.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    example: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    input_columns: ClassVar[tuple[str, ...]] = ()
    input_kind: ClassVar[str] = "text"
    splits_at_tabs: ClassVar[bool] = False
    output_kind: ClassVar[str] = "text"
    viewer_text: ClassVar[str] = "The cat sat on the mat."
    recipe: ClassVar[Recipe] = Recipe()
    data: ClassVar[str] = ""  # default training data: a dataset included in the package
    held_out: ClassVar[int] = 1000  # examples to hold out if no held-out file is given
    supports_sequence_parallel: ClassVar[bool] = (
        False  # whether the loss is a sum over tokens, which processes can share
    )

    def __post_init__(self) -> None:
        """Check options before any data is read. Subclasses that add checks call this first."""
        check_options(self)
        options = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        if not options.get("pretrained"):  # else both are those of the pretrained model
            check_minimum(self, **{name: 1 for name in ("d_model", "heads") if name in options})
            if options.get("d_model", 0) % options.get("heads", 1):
                raise ValueError(
                    f"d_model must be a multiple of heads = {options['heads']}, but is {options['d_model']}"
                )
        check_maximum(self, **{name: 1000 for name in ("beam",) if name in options})
        if not 0 <= options.get("dropout", 0) < 1:
            raise ValueError(f"dropout must be in [0, 1), but is {options['dropout']}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """Read the examples of a source."""
        return list(read_rows(source, {name: getattr(self, name) for name in self.columns}, bad))

    def split_sources(self, data: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return training and test sources; the latter are empty unless the data is one directory with both."""
        parts = self.find_splits(Path(data[0])) if len(data) == 1 else None
        return ((str(parts[0]),), (str(parts[1]),)) if parts else (data, ())

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        """Find training and test data in a directory, for tasks that support such directories."""
        return None

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Split rows into training rows and `held_out` held-out rows; rows with the same input count as one."""
        return split(rows, lambda row: self.split_key(str(row.values[0])), held_out, seed)

    def split_key(self, text: str) -> str:
        """A key that is equal for texts which the model cannot distinguish; they stay on one side of a split."""
        return normalize_text(text, loosely=bool(getattr(self, "lower", False) or getattr(self, "pretrained", "")))

    def split_validation(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Split training rows into training and validation rows; `held_out` is the size of the test set."""
        return self.hold_out(rows, max(1, min(held_out // 2, len(rows) // 10)), seed)

    @abstractmethod
    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        """Train the tokenizer and collect the labels and settings."""

    @abstractmethod
    def model(self, processor: Processor) -> nn.Module:
        """Build a model with random weights, drawn from torch's generator.

        It is also built on the device "meta" before the weights of a run are loaded, to compare shapes.
        """

    def load_pretrained(self, model: nn.Module) -> None:  # noqa: B027
        """Load pretrained weights before the first step; does nothing by default."""

    @abstractmethod
    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Dataset:
        """Encode examples; those that the model cannot process are added to `bad`."""

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether the loss supports label smoothing; if not, a recipe with smoothing is an error."""
        return True

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """Sum of the losses of a batch, over `batch.count` items."""

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """Return the rows to evaluate on: those that the model can process; others are added to `bad`."""
        return usable_rows(self, processor, rows, bad)

    def calibrate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Processor:
        """Choose thresholds of the trained model on validation rows, and return the updated processor."""
        return processor

    @abstractmethod
    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        """Compute metrics on held-out rows; a row that the model cannot process raises."""

    @abstractmethod
    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """Compute the same metrics for baselines, by name; a row that the model cannot process raises."""

    @abstractmethod
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """Yield predictions in order, with the places of the rows; inputs that cannot be processed are added to `bad`.

        Rows have one value, a text or the path of a file, or are rows from `read_inputs`.
        """

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        """Read the inputs of a source; unlike in `read`, the columns to predict may be missing."""
        columns = {name: getattr(self, name) for name in self.columns}
        return read_rows(source, columns, bad, only=self.input_columns or self.columns[:1])

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        """Name the tokens of a record of `regard.view`: tokens of the tokenizer, patches of an image."""
        if processor.tokenizer is not None:
            record.decode(processor.tokenizer)
        config: Any = getattr(model, "config", None)
        if self.input_kind == "image" and hasattr(config, "grid") and "source" in record.inputs:
            record.set_image(record.inputs["source"], config.grid, first=1)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        """The graphs that `regard export` writes as ONNX; empty if the model cannot be traced."""
        return ()


def usable_rows(task: Task, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
    """Return the rows that a task can encode; others are added to `bad`."""
    before = bad.count
    encoded = set(task.dataset(processor, rows, bad).places)
    return list(rows) if bad.count == before else [row for row in rows if row.place in encoded]


def tasks() -> dict[str, type[Task]]:
    """Return all tasks by name: built-in ones, and those of other packages with entry points `regard.tasks`."""
    from importlib import import_module
    from importlib.metadata import entry_points
    from pkgutil import iter_modules

    package = import_module("regard.tasks")  # by name: `regard.training` must not depend on tasks
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    for entry in entry_points(group="regard.tasks"):
        entry.load()
    known = {kind.name: kind for kind in _subclasses(Task) if vars(kind).get("name")}  # type: ignore[type-abstract]
    return dict(sorted(known.items(), key=lambda pair: (not pair[1].__module__.startswith("regard."), pair[0])))


def _subclasses(kind: type[Task]) -> Iterator[type[Task]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
