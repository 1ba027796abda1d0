"""What a task is. A new one is one file in this folder: a frozen dataclass that inherits `Task`, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import Row, read_rows
from regard.data.splits import normalize_text, split
from regard.errors import BadRows
from regard.training.recipe import Recipe, check_maximum, check_minimum, check_options

if TYPE_CHECKING:
    from regard.training.onnx_graphs import Graph


@dataclass(frozen=True)
class Batch:
    """What a step computes the loss of. Inputs and targets are the task's own: tensors, packed batches, tuples."""

    inputs: Any
    targets: Any
    tokens: int  # real ones, for tokens/s
    count: int  # what the loss is the mean over


class Dataset(Protocol):
    """Examples made ready for a model. `sizes` (n,) are tokens, `places` tell where each example came from."""

    sizes: np.ndarray
    places: Sequence[str]

    def batch(self, chosen: np.ndarray, random: np.random.Generator) -> Batch:
        """The chosen examples. All chance comes from `random`, so that a resumed run draws the same."""
        ...


class Prediction(NamedTuple):
    """What the model says of one input, and how sure it is: a probability, or a likeness in -1 ... 1."""

    input: str
    output: str
    score: float
    more: Mapping[str, Any] = MappingProxyType({})  # alternatives, vectors, boxes: for --json
    note: str = ""  # for those who read along, such as how fast it was
    file: bytes = b""  # what no text can say, such as a sound
    place: str = ""  # of the row


Metrics = dict[str, float]


class Task(ABC):
    """Data to training to metrics to prediction. The fields of a task are the options of `regard train`.

    name, description, example: how it is called, what it does, a few lines of its data.
    columns: what a row of its data holds, in order; each is also the name of a field that says which column it is.
    input_columns: those of them that a model predicts from; the first unless told otherwise.
    input_kind: what `regard predict` is given: "text", or "image" or "audio" for paths of such files.
    splits_at_tabs: whether a tab in a text parts what the model is given, such as a question and its context.
    output_kind: what `regard predict` gives: "text", or "audio" for files of it.
    viewer_text: what the viewer begins with, where nothing is said.
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
    data: ClassVar[str] = ""  # what is trained on where nothing is said: a dataset that comes with the package
    held_out: ClassVar[int] = 1000  # examples held out, where no file of them is given
    supports_sequence_parallel: ClassVar[bool] = False  # whether its loss is one of tokens, which processes can share

    def __post_init__(self) -> None:
        """Raise if options cannot be, before any data is read. A task that asks more of its own calls this first."""
        check_options(self)
        options = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        if not options.get("pretrained"):  # else both are those of the model that it begins with
            check_minimum(self, **{name: 1 for name in ("d_model", "heads") if name in options})
            if options.get("d_model", 0) % options.get("heads", 1):
                raise ValueError(
                    f"d_model must be a multiple of heads = {options['heads']}, but is {options['d_model']}"
                )
        check_maximum(self, **{name: 1000 for name in ("beam",) if name in options})
        if not 0 <= options.get("dropout", 0) < 1:
            raise ValueError(f"dropout must be a share in [0, 1), but is {options['dropout']}")

    def read(self, source: str, bad: BadRows) -> list[Row]:
        """The examples of a source."""
        return list(read_rows(source, {name: getattr(self, name) for name in self.columns}, bad))

    def split_sources(self, data: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Sources to train on and sources to be measured on, where the data is one folder that says so itself."""
        parts = self.find_splits(Path(data[0])) if len(data) == 1 else None
        return ((str(parts[0]),), (str(parts[1]),)) if parts else (data, ())

    def find_splits(self, folder: Path) -> tuple[Path, Path] | None:
        """What a folder has to train on and to be measured on, for tasks that know such folders."""
        return None

    def hold_out(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on and rows held out: `held_out` of them, where those with the same input count as one."""
        return split(rows, lambda row: self.split_key(str(row.values[0])), held_out, seed)

    def split_key(self, text: str) -> str:
        """The same for texts that the model sees alike: such are never on two sides of a split."""
        return normalize_text(text, loosely=bool(getattr(self, "lower", False) or getattr(self, "pretrained", "")))

    def split_validation(self, rows: Sequence[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on and rows to choose the best weights by, of those left where `held_out` are to be measured
        on."""
        return self.hold_out(rows, max(1, min(held_out // 2, len(rows) // 10)), seed)

    @abstractmethod
    def fit_processor(self, rows: Sequence[Row]) -> Processor:
        """What is to be known before training: a tokenizer, the labels."""

    @abstractmethod
    def model(self, processor: Processor) -> nn.Module:
        """A new model. Its weights are drawn from torch's generator.

        Before a run's weights are read, it is also built on the device "meta", to compare its shapes with theirs.
        """

    def load_pretrained(self, model: nn.Module) -> None:  # noqa: B027
        """Put pretrained weights in, before the first step. Nothing, unless a task can."""

    @abstractmethod
    def dataset(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> Dataset:
        """Examples made ready; those that the model cannot take are bad."""

    @property
    def supports_label_smoothing(self) -> bool:
        """Whether the loss has labels to smooth; where it has none, a recipe with smoothing is an error."""
        return True

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The sum of the losses of a batch, over `batch.count`."""

    def evaluable_rows(self, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
        """The rows that figures are measured on: those that the model can take; others are bad."""
        return usable_rows(self, processor, rows, bad)

    def calibrate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Processor:
        """What a trained model's kit is to be, by rows held out for choosing. As it was, unless a task has a choice."""
        return processor

    @abstractmethod
    def evaluate(self, model: nn.Module, processor: Processor, rows: Sequence[Row]) -> Metrics:
        """How good it is on held-out rows, by the metrics of its field; a row that it cannot take raises."""

    @abstractmethod
    def baselines(self, processor: Processor, train: Sequence[Row], held_out: Sequence[Row]) -> dict[str, Metrics]:
        """The same figures of baselines, by name, on the same rows; a row that the model cannot take raises."""

    @abstractmethod
    def predict(
        self, model: nn.Module, processor: Processor, rows: Sequence[Row], bad: BadRows
    ) -> Iterator[Prediction]:
        """What the model says of each input, in order, with the places of the rows; inputs that it cannot take are bad.

        Rows have one value, the text or the path of a file, or are such as `read_inputs` gives.
        """

    def read_inputs(self, source: str, bad: BadRows) -> Iterable[Row]:
        """The inputs of a source, read as `read` does, without what is to be predicted, which need not be there."""
        columns = {name: getattr(self, name) for name in self.columns}
        return read_rows(source, columns, bad, only=self.input_columns or self.columns[:1])

    def name_tokens(self, model: nn.Module, processor: Processor, record: Any, prediction: Prediction) -> None:
        """Tell a record of `regard.view` what its tokens are: words of the tokenizer, patches of an image."""
        if processor.tokenizer is not None:
            record.decode(processor.tokenizer)
        config: Any = getattr(model, "config", None)
        if self.input_kind == "image" and hasattr(config, "grid") and "source" in record.inputs:
            record.set_image(record.inputs["source"], config.grid, first=1)

    def graphs(self, model: nn.Module, processor: Processor) -> tuple[Graph, ...]:
        """The parts of the model that `regard export` writes as ONNX; none where it cannot be traced."""
        return ()


def usable_rows(task: Task, processor: Processor, rows: Sequence[Row], bad: BadRows) -> list[Row]:
    """The rows that a task can make ready for its model; others are bad."""
    before = bad.count
    taken = set(task.dataset(processor, rows, bad).places)
    return list(rows) if bad.count == before else [row for row in rows if row.place in taken]


def tasks() -> dict[str, type[Task]]:
    """Every task by name: those of this folder, and those of other packages, by entry points `regard.tasks`."""
    from importlib import import_module
    from importlib.metadata import entry_points
    from pkgutil import iter_modules

    package = import_module("regard.tasks")  # by name, as tasks of other packages: training imports none of them
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
