"""A run's folder: what it is (run.json), what it knows (kit), its checkpoints and its log. All writes are atomic."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.processor import Processor
from regard.data.readers import EMBEDDED, Row
from regard.errors import UserError, first_line
from regard.field_types import short_repr
from regard.files import remove_partial_files, write_atomically, write_text_atomically
from regard.models.meta import build_on_meta
from regard.nn import freeze
from regard.progress import stage
from regard.training import checksum
from regard.training.lock import NAME as LOCK
from regard.training.lock import RunLocked, locked
from regard.training.recipe import Recipe
from regard.training.run_files import (
    Shapes,
    build,
    check_model,
    naming,
    read_about,
    read_lines,
    read_notes,
    read_progress,
    shapes_of,
)
from regard.training.run_files import read_tensors as load
from regard.training.sources import Examples, Sources, split_digest
from regard.training.task import Task, tasks

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHIPPED = ("en-fr",)
FORMAT = 2  # of run.json and processor.json
KEEP = 2  # checkpoints; the one before the last is there should the last be damaged
WRITTEN = (
    "run.json",
    "processor.json",
    "tokenizer.json",
    "checkpoints",
    "log.jsonl",
    "tensorboard",
)  # before a step is made
Read = Callable[[Path], tuple[dict[str, Tensor], dict[str, str]]]


@dataclass(frozen=True)
class Progress:
    """How far a run is: all that decides what comes next, beside weights and the optimizer's memory."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch, the next one
    best: float = float("inf")
    stale: int = 0  # evaluations since the best
    done: bool = False


class Run:
    """A run directory, or what `regard export` wrote of one, which is only read.

    run.json        what is needed to repeat it, and what it reached; `exported` in an exported one
    processor.json        labels and the like; tokenizer.json beside it
    checkpoints/    the last two, weights and optimizer; one file each, or a folder where processes share the weights
    best.safetensors  the weights with the lowest validation loss; config.json and model.safetensors in an exported one
    log.jsonl       one line a step; tensorboard/ has the same
    run.lock        locked by the process that writes
    """

    def __init__(self, folder: Path, about: dict[str, Any], task: Task, recipe: Recipe, processor: Processor) -> None:
        self.folder, self.about, self.task, self.recipe, self.processor = folder, about, task, recipe, processor

    @staticmethod
    def create(
        folder: Path, task: Task, recipe: Recipe, sources: Sources, processor: Processor, examples: Examples
    ) -> Run:
        """A new run; nothing that is there is overwritten."""
        check_vacant(folder, task.name)
        about = {
            "format": FORMAT,
            "task": task.name,
            "options": asdict(task),  # type: ignore[call-overload]
            "recipe": asdict(recipe),
            "sources": sources.with_absolute_paths().to_json(),
            "split": split_digest(examples),
            "rows": examples.rows(),
            "command": sys.argv,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": environment(),
            "results": {},
        }
        folder.mkdir(parents=True, exist_ok=True)
        _remove_run(folder)
        processor.save(folder)
        (folder / "checkpoints").mkdir(exist_ok=True)
        run = Run(folder, about, task, recipe, processor)
        run.write_about()  # last: a folder with run.json is whole
        return run

    @staticmethod
    def open(folder: Path | str) -> Run:
        """The run, or the exported one, that a folder holds; or the one of that name that comes with the package."""
        folder = Path(folder)
        if not folder.exists() and str(folder) in SHIPPED:
            folder = EMBEDDED / folder
        if not folder.exists():
            raise UserError(f"{folder}: there is no such run; regard train TASK --out {folder} makes one")
        if not (folder / "run.json").exists():
            raise UserError(
                f"{folder}: holds no run (there is no run.json); name the folder that regard train --out or "
                "regard export wrote"
            )
        about, known = read_about(folder), tasks()
        with naming(folder / "run.json"):
            if about["task"] not in known:
                raise UserError(f"the task {short_repr(about['task'])} is not known; known are {', '.join(known)}")
            task = build(known[about["task"]], about["options"], "options")
            recipe = build(Recipe, about["recipe"], "recipe")
        return Run(folder, about, task, recipe, Processor.load(folder))

    def write_about(self) -> None:
        """Write run.json."""
        with _explain_full_disk(self.folder):
            write_text_atomically(self.folder / "run.json", json.dumps(self.about, indent=1, ensure_ascii=False))

    def keep_results(self, results: dict[str, Any]) -> None:
        """Write figures of the best weights into run.json; `RunLocked` if a training writes, or has written others."""
        with locked(self.folder):
            best = self.folder / "best.safetensors"
            if best.exists():
                with naming(best):
                    if _step(read_notes(best)) != results["step"]:
                        raise RunLocked(f"{best}: was replaced while it was measured; run the command again")
            self.about = read_about(self.folder) | {"results": results}
            self.write_about()

    def checkpoints(self) -> list[Path]:
        """The newest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"), reverse=True)

    def save(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """A checkpoint in one file. The last good one stays until this one is safe on the disk."""
        path = self.folder / "checkpoints" / f"step-{progress.step:08}.safetensors"
        path.parent.mkdir(exist_ok=True)
        self._write(path, tensors, progress)
        self._clear()
        return path

    def save_shard(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """A checkpoint of tensors that processes share: a folder, to which every process writes its part."""
        from regard.training import sharded_checkpoint

        path = self.folder / "checkpoints" / f"step-{progress.step:08}"
        path.parent.mkdir(exist_ok=True)
        with _explain_full_disk(self.folder):
            sharded_checkpoint.save(path, tensors, {"progress": json.dumps(asdict(progress))})
        self._clear()
        return path

    def _clear(self) -> None:
        """Old checkpoints go; another process may have been faster."""
        for old in self.checkpoints()[KEEP:]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)

    def remove_partial_files(self) -> None:
        """What a training that was killed left half written goes. For the one process that begins or goes on."""
        for folder in (self.folder, self.folder / "checkpoints"):
            remove_partial_files(folder)

    def latest(
        self, on_skip: Callable[[str], None] = lambda line: None, read: Read | None = None
    ) -> tuple[dict[str, Tensor], Progress] | None:
        """The newest checkpoint that can be read; `on_skip` hears of those that cannot."""
        paths = self.checkpoints()
        for path, before in zip(paths, [*paths[1:], None], strict=False):
            try:
                tensors, notes = (read or load)(path)
                return tensors, read_progress(Progress, notes)
            except Exception as error:  # whatever is wrong with it, there may be another
                then = f"; {before.name} is tried instead" if before is not None else ""
                on_skip(f"{path}: cannot be read ({first_line(error)}){then}")
        if paths:
            raise UserError(f"{paths[0].parent}: no checkpoint can be read; begin another run")
        return None

    def keep_best(self, weights: dict[str, Tensor], progress: Progress) -> None:
        """The weights to predict with."""
        self._write(self.folder / "best.safetensors", weights, progress)

    def _write(self, path: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
        from safetensors.torch import save_file

        notes = {"progress": json.dumps(asdict(progress))}
        notes[checksum.NAME] = checksum.of_tensors(tensors, notes)
        with _explain_full_disk(self.folder):
            write_atomically(path, lambda there: save_file(tensors, str(there), notes))

    def best_problem(self) -> str:
        """What is wrong with the best weights; nothing where they can be read."""
        path = self.folder / "best.safetensors"
        try:
            load(path)
        except Exception as error:  # any damage
            return f"{path}: {f'cannot be read ({first_line(error)})' if path.exists() else 'is gone'}"
        return ""

    def minutes(self) -> float:
        """That its steps took, all together."""
        if self.exported:
            return self.about["exported"]["minutes"]
        return sum(line.get("seconds", 0.0) for line in read_lines(self.folder / "log.jsonl")) / 60

    @property
    def exported(self) -> bool:
        """Whether it is a model to use, without checkpoints to go on from: nothing is written to its folder."""
        return self.about.get("exported") is not None

    def model(self, *, frozen: bool = False) -> tuple[nn.Module, int]:
        """The model with its best weights, ready to predict, and the step that they are of.

        frozen: pack the weights for inference (`regard.nn.freeze`).
        """
        with stage("loading the model"):
            return self._model(frozen)

    def _model(self, frozen: bool) -> tuple[nn.Module, int]:
        if self.exported:
            return self._exported_model(frozen), self.about["exported"]["step"]
        path = self.folder / "best.safetensors"
        if path.exists():
            with naming(path, f"regard resume {self.folder} writes it anew"):
                shapes = shapes_of(path)
                self.check_model(path, shapes)
                weights, notes = load(path)
                step = _step(notes)
        else:
            found = self.latest()
            if found is None:
                raise UserError(f"{self.folder}: nothing is trained yet; regard resume {self.folder} begins")
            tensors, progress = found
            prefix = "average." if any(name.startswith("average.") for name in tensors) else "model."
            weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            self.check_model(self.folder / "checkpoints", {name: tuple(x.shape) for name, x in weights.items()})
            step = progress.step
        with naming(self.folder), torch.random.fork_rng():
            model = self.task.model(self.processor)
            model.load_state_dict(weights)
        if frozen:
            freeze(model)
        return model.eval(), step

    def check_model(self, path: Path, shapes: Shapes) -> None:
        """Raise unless run.json, processor.json and tokenizer.json describe a model with the tensors of this file."""
        with naming(f"{self.folder}/run.json or processor.json"):
            model = build_on_meta(lambda: self.task.model(self.processor), tensor_count=len(shapes))
        with naming(path, "do these files belong together?"):
            check_model(model, shapes)

    def check_checkpoint(self) -> None:
        """The same for the newest checkpoint that can be read, before a training builds its model."""
        for path in self.checkpoints():
            try:
                shapes = shapes_of(path)
            except Exception:  # `latest` reports it
                continue
            own = {name.removeprefix("model."): shape for name, shape in shapes.items() if name.startswith("model.")}
            self.check_model(path, own)
            break

    def _exported_model(self, frozen: bool) -> nn.Module:
        from regard.models import load as load_checkpoint

        with naming(self.folder, "export the run again"):
            return load_checkpoint(self.folder, dtype=torch.float32, frozen=frozen)

    def calibrate(self, rows: Sequence[Row]) -> None:
        """Let the task choose what is to be chosen after training, by rows held out for that, and keep it."""
        model, _ = self.model(frozen=True)
        with stage("calibrating"):
            processor = self.task.calibrate(model, self.processor, rows)
        if processor is not self.processor:
            self.processor = processor
            with _explain_full_disk(self.folder):
                write_text_atomically(self.folder / "processor.json", processor.to_json())


class Log:
    """log.jsonl and TensorBoard, one line a step; lines behind the step that a run goes on from are cut off."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "log.jsonl"
        kept = [line for line in read_lines(path) if line["step"] <= step]
        with _explain_full_disk(folder):
            write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = path.open("a", buffering=1, encoding="utf-8")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def __call__(self, step: int, **figures: float) -> None:
        self.file.write(json.dumps({"step": step} | figures) + "\n")
        for name, value in figures.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        self.board.close()


@contextmanager
def _explain_full_disk(run: Path) -> Iterator[None]:
    """Within, what does not fit on the disk is told, with how the run in this folder goes on."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = shutil.disk_usage(run).free / 1e6
        raise UserError(
            f"{run}: the disk is full ({free:.0f} MB free); what was written before is safe; make room, then "
            f"regard resume {run}"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room; safetensors tells it in words."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    return type(error).__name__ == "SafetensorError" and any(f"(os error {n})" in str(error) for n in NO_ROOM)


def _step(notes: dict[str, str]) -> int:
    return read_progress(Progress, notes).step


@contextmanager
def reserve_folder(folder: Path, task: str) -> Iterator[None]:
    """Within, a run may be made in this folder, by this process alone. If it fails, the folder is as it was."""
    check_vacant(folder, task)
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_vacant(folder, task)  # another process may have made one before this one had the lock
        try:
            yield
        except BaseException:
            if not (folder / "run.json").exists():
                _remove_run(folder)
                with suppress(OSError):
                    (folder / LOCK).unlink()
                    for each in created:
                        each.rmdir()
            raise


def check_vacant(folder: Path, task: str) -> None:
    """Raise unless a run of a task may be made here: in place of nothing, or of one that made no step."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another --out")
    if (folder / "run.json").exists():
        try:
            there = read_about(folder)["task"]
        except UserError:
            raise UserError(f"{folder}: holds a run whose run.json cannot be read; choose another --out") from None
        if there != task or (folder / "config.json").exists() or has_steps(folder):  # config.json: an exported run
            raise UserError(
                f"{folder}: holds a run of {there}; go on with regard resume {folder}, or choose another --out"
            )
        return
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    # With the lock, what a process that was killed while it made a run left behind.
    left = {LOCK, *WRITTEN, *(name for name in names if name.startswith(".") and name.endswith(".part"))}
    if names and not (LOCK in names and names <= left):
        raise UserError(f"{folder}: is not empty and holds no run; choose another --out")


def has_steps(folder: Path) -> bool:
    """Whether the run in a folder made a step, so that there is something to lose."""
    kept = [path.name.partition(".")[0] for path in (folder / "checkpoints").glob("step-*")]
    return (
        (folder / "best.safetensors").exists()
        or any(name != f"step-{0:08}" for name in kept)
        or any(line["step"] for line in read_lines(folder / "log.jsonl"))
    )


def _remove_run(folder: Path) -> None:
    """Delete what a run without steps has written; run.json first, since a folder with it is whole."""
    for path in (folder / name for name in WRITTEN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    remove_partial_files(folder)


def environment() -> dict[str, Any]:
    """What the same bits depend on."""
    try:
        regard = version("regard")
    except PackageNotFoundError:
        regard = "not installed"
    return {
        "regard": regard,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
