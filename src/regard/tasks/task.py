"""What a task is. A new one is one file in this folder: a frozen dataclass that inherits `Task`, and nothing else."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

from regard.field_types import check_fields, check_value, quoted
from regard.tasks.data import Row, as_seen, read, split
from regard.tasks.run_files import build, naming, read_object
from regard.tasks.trouble import Bad, Trouble

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from regard.tasks.graphs import Graph


def option(default: Any, help: str) -> Any:
    """A field of a task or a recipe that the command takes as an option."""
    return field(default=default, metadata={"help": help})


def check_options(options: Any) -> None:
    """Raise unless every field of a task or a recipe has its type."""
    check_fields(type(options), {each.name: getattr(options, each.name) for each in fields(options)})


def check_most(options: Any, **most: int) -> None:
    """Raise if an option is more than it may be."""
    for name, bound in most.items():
        if getattr(options, name) > bound:
            raise ValueError(f"{name} must be at most {bound}, but is {getattr(options, name)}")


def check_least(options: Any, **least: int) -> None:
    """Raise if an option is less than it may be."""
    for name, bound in least.items():
        if getattr(options, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, but is {getattr(options, name)}")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, whatever the task. AdamW, warm-up, then half a cosine down to 0.

    >>> from regard.tasks.task import Recipe
    >>> Recipe(steps=100, warmup=10).rate_at(10), Recipe(steps=100, warmup=10).rate_at(100)
    (0.001, 0.0)
    """

    steps: int = option(2000, "optimizer steps")
    tokens: int = option(4096, "real tokens in a step, over all processes and accumulated parts")
    accumulate: int = option(
        1,
        "parts in which a process takes its share of a step, to save memory; detect divides by the objects of a part, "
        "and embed and match compare within a part, so that what they minimise depends on it and on the processes",
    )
    rate: float = option(1e-3, "highest learning rate")
    warmup: int = option(200, "steps over which the rate rises")
    decay: float = option(0.01, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    smoothing: float = option(0.0, "label smoothing")
    ema: float = option(0.998, "decay of the moving average of the weights, which is what is evaluated; 0 for none")
    patience: int = option(0, "stop after so many evaluations without a better loss; 0 for never")
    evaluate_every: int = option(250, "steps between evaluations on validation data")
    save_every: int = option(250, "steps between checkpoints")
    precision: str = option("no", "mixed precision: no, bf16 or fp16")
    seed: int = option(1, "of weights, order and dropout")
    shard: str = option("data", "what processes share: data (each has the whole model), or fsdp (weights too)")
    sequence_ranks: int = option(1, "processes that share one sequence, for long ones; a divisor of all processes")

    def __post_init__(self) -> None:
        check_options(self)
        check_least(self, steps=1, tokens=1, accumulate=1, evaluate_every=1, save_every=1, sequence_ranks=1)
        check_least(self, warmup=0, patience=0, seed=0)
        if not 0 <= self.ema < 1 or not 0 <= self.smoothing < 1:
            raise ValueError(f"ema and smoothing must be in [0, 1), but are {self.ema} and {self.smoothing}")
        if not self.rate > 0 or not self.clip > 0:
            raise ValueError(f"rate and clip must be positive, but are {self.rate} and {self.clip}")
        if self.precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"precision must be no, bf16 or fp16, but is {self.precision!r}")
        if self.shard not in ("data", "fsdp"):
            raise ValueError(f"shard must be data or fsdp, but is {self.shard!r}")

    def rate_at(self, step: int) -> float:
        """The learning rate of step 1 ... steps."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return float(self.rate * 0.5 * (1 + np.cos(np.pi * min(done, 1.0))))


@dataclass(frozen=True)
class Kit:
    """What a task learns from its data before training and needs ever after.

    config: fields of the model's configuration that a pretrained model brought along, or the form of images.
    settled: what was chosen after training, by what is held out for choosing, such as thresholds.
    """

    tokenizer: Tokenizer | None = None
    labels: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    settled: dict[str, float] | None = None

    def texts(self) -> Tokenizer:
        """The tokenizer, of a task that has one."""
        if self.tokenizer is None:
            raise Trouble("the run has no tokenizer; is it one on texts, with tokenizer.json in its folder?")
        return self.tokenizer

    def settings(self) -> dict[str, Any]:
        """What `config` holds, its lists as tuples, as they were before JSON."""
        if self.config is None:
            raise Trouble("the run has no config in kit.json; is it whole?")
        return {key: tuple(value) if isinstance(value, list) else value for key, value in self.config.items()}

    def settings_as(self, kind: Any) -> Any:
        """What `config` holds as a dataclass, each value of the type of its field."""
        return build(kind, self.settings(), "config")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, if there is one, and kit.json."""
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "kit.json").write_text(self.told(), encoding="utf-8")

    def told(self) -> str:
        """All but the tokenizer, as JSON."""
        kit = {"labels": list(self.labels), "config": self.config, "settled": self.settled}
        return json.dumps(kit, indent=1, ensure_ascii=False)

    @staticmethod
    def load(folder: Path) -> Kit:
        """What `save` wrote."""
        tokenizer = None
        if (folder / "tokenizer.json").exists():
            tokenizer = _tokenizer(folder / "tokenizer.json")
        path = folder / "kit.json"
        kit = read_object(path)
        with naming(path):
            labels, config, settled = kit.get("labels"), kit.get("config"), kit.get("settled")
            if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
                raise ValueError(f"labels must be a list of texts, but is {quoted(labels)}")
            if len(set(labels)) != len(labels):
                raise ValueError(f"labels must differ, but two are the same: {quoted(labels)}")
            check_value("config", config, dict[str, Any] | None)
            check_value("settled", settled, dict[str, float] | None)
            rows = (config or {}).get("vocabulary", 0)
            check_value("config.vocabulary", rows, int)
        if tokenizer is not None:
            largest, rows = max(tokenizer.get_vocab().values(), default=-1), max(rows, tokenizer.get_vocab_size())
            if largest >= rows:
                raise Trouble(f"{folder / 'tokenizer.json'}: has a token {largest}, but must have them below {rows}")
        return Kit(tokenizer, tuple(labels), config, settled)


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run, which gives every token its id and nothing else."""
    from regard.models.checkpoints.tokens import read_tokenizer

    with naming(path):
        found = read_tokenizer(path)
        if found.padding is not None or found.truncation is not None:
            raise ValueError("pads or cuts texts, which the tokenizer of a run must not; was it changed?")
    return found


@dataclass(frozen=True)
class Batch:
    """What a step computes the loss of. Inputs and targets are the task's own: tensors, packed batches, tuples."""

    inputs: Any
    targets: Any
    tokens: int  # real ones, for tokens/s
    count: int  # what the loss is the mean over


class Items(Protocol):
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


Figures = dict[str, float]


class Task(ABC):
    """Data to training to metrics to prediction. The fields of a task are the options of `regard train`.

    name, does, example: how it is called, what it does, a few lines of its data.
    columns: what a row of its data holds, in order; each is also the name of a field that says which column it is.
    input_columns: those of them that a model predicts from; the first unless told otherwise.
    takes: what `regard predict` is given: "text", or "image" or "audio" for paths of such files.
    takes_tabs: whether a tab in a text parts what the model is given, such as a question and its context.
    makes: what `regard predict` gives: "text", or "audio" for files of it.
    shown: what the viewer begins with, where nothing is said.
    """

    name: ClassVar[str]
    does: ClassVar[str]
    example: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ()
    input_columns: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[str] = "text"
    takes_tabs: ClassVar[bool] = False
    makes: ClassVar[str] = "text"
    shown: ClassVar[str] = "The cat sat on the mat."
    recipe: ClassVar[Recipe] = Recipe()
    data: ClassVar[str] = ""  # what is trained on where nothing is said: a dataset that comes with the package
    held: ClassVar[int] = 1000  # examples held out, where no file of them is given
    shares_sequences: ClassVar[bool] = False  # whether its loss is one of tokens, which processes can share

    def __post_init__(self) -> None:
        """Raise if options cannot be, before any data is read. A task that asks more of its own calls this first."""
        check_options(self)
        told = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        if not told.get("start"):  # else both are those of the model that it begins with
            check_least(self, **{name: 1 for name in ("width", "heads") if name in told})
            if told.get("width", 0) % told.get("heads", 1):
                raise ValueError(f"width must be a multiple of heads = {told['heads']}, but is {told['width']}")
        check_most(self, **{name: 1000 for name in ("beam",) if name in told})
        if not 0 <= told.get("dropout", 0) < 1:
            raise ValueError(f"dropout must be a share in [0, 1), but is {told['dropout']}")

    def read(self, source: str, bad: Bad) -> list[Row]:
        """The examples of a source."""
        return list(read(source, {name: getattr(self, name) for name in self.columns}, bad))

    def parted(self, data: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Sources to train on and sources to be measured on, where the data is one folder that says so itself."""
        parts = self.parts(Path(data[0])) if len(data) == 1 else None
        return ((str(parts[0]),), (str(parts[1]),)) if parts else (data, ())

    def parts(self, folder: Path) -> tuple[Path, Path] | None:
        """What a folder has to train on and to be measured on, for tasks that know such folders."""
        return None

    def hold_out(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on and rows held out: `held` of them, where those with the same input count as one."""
        return split(rows, lambda row: self.seen(str(row.values[0])), held, seed)

    def seen(self, text: str) -> str:
        """The same for texts that the model sees alike: such are never on two sides of a split."""
        return as_seen(text, loosely=bool(getattr(self, "lower", False) or getattr(self, "start", "")))

    def choose_by(self, rows: Sequence[Row], held: int, seed: int) -> tuple[list[Row], list[Row]]:
        """Rows to train on and rows to choose the best weights by, of those left where `held` are to be measured on."""
        return self.hold_out(rows, max(1, min(held // 2, len(rows) // 10)), seed)

    @abstractmethod
    def learn(self, rows: Sequence[Row]) -> Kit:
        """What is to be known before training: a tokenizer, the labels."""

    @abstractmethod
    def model(self, kit: Kit) -> nn.Module:
        """A new model. Its weights are drawn from torch's generator.

        Before a run's weights are read, it is also built on the device "meta", to compare its shapes with theirs.
        """

    def begin(self, model: nn.Module) -> None:  # noqa: B027
        """Put pretrained weights in, before the first step. Nothing, unless a task can."""

    @abstractmethod
    def items(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> Items:
        """Examples made ready; those that the model cannot take are bad."""

    @property
    def smooths(self) -> bool:
        """Whether the loss has labels to smooth; where it has none, a recipe with smoothing is an error."""
        return True

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        """The sum of the losses of a batch, over `batch.count`."""

    def measured(self, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
        """The rows that figures are measured on: those that the model can take; others are bad."""
        return usable(self, kit, rows, bad)

    def settle(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Kit:
        """What a trained model's kit is to be, by rows held out for choosing. As it was, unless a task has a choice."""
        return kit

    @abstractmethod
    def evaluate(self, model: nn.Module, kit: Kit, rows: Sequence[Row]) -> Figures:
        """How good it is on held-out rows, by the metrics of its field; a row that it cannot take raises."""

    @abstractmethod
    def baselines(self, kit: Kit, train: Sequence[Row], held: Sequence[Row]) -> dict[str, Figures]:
        """The same figures of baselines, by name, on the same rows; a row that the model cannot take raises."""

    @abstractmethod
    def predict(self, model: nn.Module, kit: Kit, rows: Sequence[Row], bad: Bad) -> Iterator[Prediction]:
        """What the model says of each input, in order, with the places of the rows; inputs that it cannot take are bad.

        Rows have one value, the text or the path of a file, or are such as `read_inputs` gives.
        """

    def read_inputs(self, source: str, bad: Bad) -> Iterable[Row]:
        """The inputs of a source, read as `read` does, without what is to be predicted, which need not be there."""
        columns = {name: getattr(self, name) for name in self.columns}
        return read(source, columns, bad, only=self.input_columns or self.columns[:1])

    def name_tokens(self, model: nn.Module, kit: Kit, record: Any, said: Prediction) -> None:
        """Tell a record of `regard.view` what its tokens are: words of the tokenizer, patches of an image."""
        if kit.tokenizer is not None:
            record.decode(kit.tokenizer)
        config: Any = getattr(model, "config", None)
        if self.takes == "image" and hasattr(config, "grid") and "source" in record.inputs:
            record.over_image(record.inputs["source"], config.grid, first=1)

    def graphs(self, model: nn.Module, kit: Kit) -> tuple[Graph, ...]:
        """The parts of the model that `regard export` writes as ONNX; none where it cannot be traced."""
        return ()


def usable(task: Task, kit: Kit, rows: Sequence[Row], bad: Bad) -> list[Row]:
    """The rows that a task can make ready for its model; others are bad."""
    before = bad.count
    taken = set(task.items(kit, rows, bad).places)
    return list(rows) if bad.count == before else [row for row in rows if row.place in taken]


def tasks() -> dict[str, type[Task]]:
    """Every task by name: those of this folder, and those of other packages, by entry points `regard.tasks`."""
    from importlib import import_module
    from importlib.metadata import entry_points
    from pkgutil import iter_modules

    import regard.tasks

    for module in iter_modules(regard.tasks.__path__):
        import_module(f"regard.tasks.{module.name}")
    for entry in entry_points(group="regard.tasks"):
        entry.load()
    known = {kind.name: kind for kind in _heirs(Task) if vars(kind).get("name")}  # type: ignore[type-abstract]
    return dict(sorted(known.items(), key=lambda pair: (not pair[1].__module__.startswith("regard."), pair[0])))


def _heirs(kind: type[Task]) -> Iterator[type[Task]]:
    for heir in kind.__subclasses__():
        yield heir
        yield from _heirs(heir)
