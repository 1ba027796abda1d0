"""Where the examples of a run come from: files or datasets to train on, and what is held out."""

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
    """A file that a run was trained on is not there."""


@dataclass(frozen=True)
class Sources:
    """data: to train on. valid: to choose the best weights by. test: to tell how good they are.

    Without test, valid serves for both. Without either, the data may say itself what is for test (see `Task.parted`),
    or `held_out` groups of it are; and without valid, half as many of what is left, a tenth at most, are for that.
    skip_bad: go on past bad lines.
    """

    data: tuple[str, ...]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    held_out: int = 1000
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("no data was given; say --data FILE (regard tasks shows what each task takes)")
        if not self.validation and self.held_out < 1:
            raise UserError(
                f"held_out must be at least 1, but is {self.held_out}; or give held-out data with --validation FILE"
            )

    def with_absolute_paths(self) -> Sources:
        """The same with absolute paths, so that a run can be resumed from any folder."""

        def resolve(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(str(Path(name).resolve()) if Path(name).exists() else name for name in names)

        return Sources(resolve(self.data), resolve(self.validation), resolve(self.test), self.held_out, self.skip_bad)

    def to_json(self) -> dict[str, Any]:
        """For run.json, with digests of the files."""
        return asdict(self) | {"files": [fingerprint(source) for source in (*self.data, *self.validation, *self.test)]}

    @staticmethod
    def from_json(about: dict[str, Any], *, check: bool = True) -> Sources:
        """What `about` wrote; a file that changed since is no good for going on."""
        for known in about["files"] if check else ():
            now = fingerprint(known["source"])
            if "sha256" in known and now != known:
                if "sha256" not in now:
                    raise DataGone(
                        f"{known['source']}: is gone since the run began; put it back, begin another run, or measure "
                        "other data with --data FILE"
                    )
                raise UserError(f"{known['source']}: changed since the run began; put it back, or begin another run")
        data, validation, test = (tuple(about[name]) for name in ("data", "validation", "test"))
        return Sources(data, validation, test, about["held_out"], about["skip_bad"])


class Examples(NamedTuple):
    """What a run trains on, chooses its best weights by and is measured on, and what was left out."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    bad: BadRows

    def rows(self) -> dict[str, int]:
        """How many there are, by the names of the splits."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}


def splits(rows: Mapping[str, int], *, shared: bool = False) -> str:
    """How many rows the splits have. shared: whether the validation rows are the test rows.

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
    """A digest of which rows are held out; of their files only the names count, so that data may move."""
    places = (Path(row.place).name for part in (examples.validation, examples.test) for row in (*part, Row("", ())))
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def reread_examples(run: Run, *, skip_bad: bool = False) -> Examples:
    """The examples of a run, which must be those that it began with."""
    with stage("checking that the data is the same"):
        sources = Sources.from_json(run.about["sources"])
    examples = read_examples(run.task, replace(sources, skip_bad=skip_bad or sources.skip_bad), run.recipe.seed)
    drawn = not (sources.validation and sources.test)
    if drawn and run.about.get("split") != split_digest(examples):
        raise UserError(
            f"{run.folder}: holds out other rows than when it began, with another version of regard; begin another run"
        )
    return examples


def read_examples(task: Task, sources: Sources, seed: int) -> Examples:
    """Read all of it."""
    with stage("reading data"):
        return _gather(task, sources, seed)


def _gather(task: Task, sources: Sources, seed: int) -> Examples:
    bad = BadRows(skip=sources.skip_bad)
    data, measured = (
        (sources.data, sources.test) if sources.test or sources.validation else task.split_sources(sources.data)
    )
    train, validation, test = (
        [row for source in part for row in task.read(source, bad)] for part in (data, sources.validation, measured)
    )
    if not sources.validation and not measured:
        train, test = task.hold_out(train, sources.held_out, seed)
    if not sources.validation:
        train, validation = task.split_validation(train, sources.held_out, seed)
    return Examples(train, validation, test or validation, bad)
