"""Where the examples of a run come from: files or datasets to train on, and what is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.tasks.data import Row, fingerprint
from regard.tasks.stages import stage
from regard.tasks.task import Task
from regard.tasks.trouble import Bad, Trouble

if TYPE_CHECKING:
    from regard.tasks.runs import Run


class DataGone(Trouble):
    """A file that a run was trained on is not there."""


@dataclass(frozen=True)
class Sources:
    """data: to train on. valid: to choose the best weights by. test: to tell how good they are.

    Without test, valid serves for both. Without either, the data may say itself what is for test (see `Task.parted`),
    or `held` groups of it are; and without valid, half as many of what is left, a tenth at most, are for that.
    skip_bad: go on past bad lines.
    """

    data: tuple[str, ...]
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    held: int = 1000
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not self.data:
            raise Trouble("no data was given; say --data FILE (regard tasks shows what each task takes)")
        if not self.valid and self.held < 1:
            raise Trouble(f"held must be at least 1, but is {self.held}; or give held-out data with --valid FILE")

    def settled(self) -> Sources:
        """The same with absolute paths, so that a run can be resumed from any folder."""

        def there(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(str(Path(name).resolve()) if Path(name).exists() else name for name in names)

        return Sources(there(self.data), there(self.valid), there(self.test), self.held, self.skip_bad)

    def about(self) -> dict[str, Any]:
        """For run.json, with digests of the files."""
        return asdict(self) | {"files": [fingerprint(source) for source in (*self.data, *self.valid, *self.test)]}

    @staticmethod
    def of(about: dict[str, Any], *, check: bool = True) -> Sources:
        """What `about` wrote; a file that changed since is no good for going on."""
        for known in about["files"] if check else ():
            now = fingerprint(known["source"])
            if "sha256" in known and now != known:
                if "sha256" not in now:
                    raise DataGone(
                        f"{known['source']}: is gone since the run began; put it back, begin another run, or measure "
                        "other data with --data FILE"
                    )
                raise Trouble(f"{known['source']}: changed since the run began; put it back, or begin another run")
        data, valid, test = (tuple(about[name]) for name in ("data", "valid", "test"))
        return Sources(data, valid, test, about["held"], about["skip_bad"])


class Examples(NamedTuple):
    """What a run trains on, chooses its best weights by and is measured on, and what was left out."""

    train: list[Row]
    valid: list[Row]
    test: list[Row]
    bad: Bad

    def rows(self) -> dict[str, int]:
        """How many there are, by the names of the splits."""
        return {"train": len(self.train), "validation": len(self.valid), "test": len(self.test)}


def splits(rows: Mapping[str, int], *, shared: bool = False) -> str:
    """How many rows the splits have. shared: whether the validation rows are the test rows.

    >>> from regard.tasks.sources import splits
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
    places = (Path(row.place).name for part in (examples.valid, examples.test) for row in (*part, Row("", ())))
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def gather_again(run: Run, *, skip_bad: bool = False) -> Examples:
    """The examples of a run, which must be those that it began with."""
    with stage("checking that the data is the same"):
        sources = Sources.of(run.about["sources"])
    examples = gather(run.task, replace(sources, skip_bad=skip_bad or sources.skip_bad), run.recipe.seed)
    drawn = not (sources.valid and sources.test)
    if drawn and run.about.get("split") != split_digest(examples):
        raise Trouble(
            f"{run.folder}: holds out other rows than when it began, with another version of regard; begin another run"
        )
    return examples


def gather(task: Task, sources: Sources, seed: int) -> Examples:
    """Read all of it."""
    with stage("reading data"):
        return _gather(task, sources, seed)


def _gather(task: Task, sources: Sources, seed: int) -> Examples:
    bad = Bad(skip=sources.skip_bad)
    data, measured = (sources.data, sources.test) if sources.test or sources.valid else task.parted(sources.data)
    train, valid, test = (
        [row for source in part for row in task.read(source, bad)] for part in (data, sources.valid, measured)
    )
    if not sources.valid and not measured:
        train, test = task.hold_out(train, sources.held, seed)
    if not sources.valid:
        train, valid = task.choose_by(train, sources.held, seed)
    return Examples(train, valid, test or valid, bad)
