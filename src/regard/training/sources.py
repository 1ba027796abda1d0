"""Sources of the examples of a run: training, validation and test data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.readers import Row, fingerprint
from regard.errors import BadRows, UserError
from regard.progress import stage
from regard.training.task import Task

if TYPE_CHECKING:
    from regard.training.runs import Run


class DataGone(UserError):
    """Training data of a run is missing."""


@dataclass(frozen=True)
class Sources:
    """Files or datasets for training (`data`), for choosing the best weights (`validation`) and for testing (`test`).

    Without `test`, validation data serves for both. Without either, the test data is that of the data itself (see
    `Task.split_sources`) or `held_out` groups of it. Without `validation`, half as many of the rest, at most a tenth,
    are used.
    skip_bad: leave out bad rows instead of raising.
    """

    data: tuple[str, ...]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    held_out: int = 1000
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("no data; pass --data FILE (regard tasks lists the data of each task)")
        if not self.validation and self.held_out < 1:
            raise UserError(
                f"held_out must be at least 1, but is {self.held_out}; or pass held-out data with --validation FILE"
            )

    def with_absolute_paths(self) -> Sources:
        """Return a copy with absolute paths, so that a run can be resumed from any directory."""

        def resolve(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(str(Path(name).resolve()) if Path(name).exists() else name for name in names)

        return Sources(resolve(self.data), resolve(self.validation), resolve(self.test), self.held_out, self.skip_bad)

    def to_json(self) -> dict[str, Any]:
        """Encode for run.json, with digests of the files."""
        return asdict(self) | {"files": [fingerprint(source) for source in (*self.data, *self.validation, *self.test)]}

    @staticmethod
    def from_json(about: dict[str, Any], *, check: bool = True) -> Sources:
        """Restore from run.json; raise if a file has changed, unless `check` is False."""
        for known in about["files"] if check else ():
            now = fingerprint(known["source"])
            if "sha256" in known and now != known:
                if "sha256" not in now:
                    raise DataGone(
                        f"{known['source']}: missing training data; restore it, start another run, or evaluate "
                        "on other data with --data FILE"
                    )
                raise UserError(f"{known['source']}: changed since the run started; restore it, or start another run")
        data, validation, test = (tuple(about[name]) for name in ("data", "validation", "test"))
        return Sources(data, validation, test, about["held_out"], about["skip_bad"])


class Examples(NamedTuple):
    """Rows for training, validation and testing, and the bad rows."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    bad: BadRows

    def rows(self) -> dict[str, int]:
        """Number of rows per split."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}


def splits(rows: Mapping[str, int], *, shared: bool = False) -> str:
    """Describe the sizes of the splits. shared: whether validation and test rows are the same.

    >>> from regard.training.sources import splits
    >>> splits({"train": 1192, "validation": 35, "test": 73})
    '1,192 train, 35 validation, 73 test'
    >>> splits({"train": 1192, "validation": 35, "test": 35}, shared=True)
    '1,192 train, 35 validation and test (the same rows)'
    """
    if shared:
        return f"{rows['train']:,} train, {rows['validation']:,} validation and test (the same rows)"
    return ", ".join(f"{rows[name]:,} {name}" for name in ("train", "validation", "test"))


def split_digest(examples: Examples) -> str:
    """Digest of the held-out rows, by file names without directories, so that data may move."""
    places = (Path(row.place).name for part in (examples.validation, examples.test) for row in (*part, Row("", ())))
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def reread_examples(run: Run, *, skip_bad: bool = False) -> Examples:
    """Read the examples of a run again; raise if they have changed."""
    with stage("checking that the data is the same"):
        sources = Sources.from_json(run.about["sources"])
    examples = read_examples(run.task, replace(sources, skip_bad=skip_bad or sources.skip_bad), run.recipe.seed)
    random_split = not (sources.validation and sources.test)
    if random_split and run.about.get("split") != split_digest(examples):
        raise UserError(
            f"{run.folder}: this version of regard holds out other rows than the run started with; start another run"
        )
    return examples


def read_examples(task: Task, sources: Sources, seed: int) -> Examples:
    """Read all sources and split them."""
    with stage("reading data"):
        return _gather(task, sources, seed)


def _gather(task: Task, sources: Sources, seed: int) -> Examples:
    bad = BadRows(skip=sources.skip_bad)
    data, test_sources = (
        (sources.data, sources.test) if sources.test or sources.validation else task.split_sources(sources.data)
    )
    train, validation, test = (
        [row for source in part for row in task.read(source, bad)] for part in (data, sources.validation, test_sources)
    )
    if not sources.validation and not test_sources:
        train, test = task.hold_out(train, sources.held_out, seed)
    if not sources.validation:
        train, validation = task.split_validation(train, sources.held_out, seed)
    return Examples(train, validation, test or validation, bad)
