"""Run directories: run.json, processor, checkpoints and log. All writes are atomic."""

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
from regard.training.lock import RunLocked, lock_run
from regard.training.recipe import Recipe
from regard.training.run_files import (
    FORMAT,
    Shapes,
    build,
    check_model,
    name_in_errors,
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
KEEP = 2  # checkpoints; the older one is a fallback if the last is damaged
WRITTEN = (
    "run.json",
    "processor.json",
    "tokenizer.json",
    "checkpoints",
    "log.jsonl",
    "tensorboard",
)  # files that exist before the first step
Read = Callable[[Path], tuple[dict[str, Tensor], dict[str, str]]]


@dataclass(frozen=True)
class Progress:
    """Position of a run: all state besides the weights and the optimizer."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    best: float = float("inf")
    stale: int = 0  # evaluations since the best one
    done: bool = False


class Run:
    """A run directory, or an exported one, which is read-only.

    run.json          settings to repeat the run, and its results; has `exported` if exported
    processor.json    labels and settings; tokenizer.json next to it
    checkpoints/      the last two, weights and optimizer: a file each, or a directory if weights are sharded
    best.safetensors  weights with the lowest validation loss; config.json and model.safetensors if exported
    log.jsonl         one line per step; tensorboard/ has the same
    run.lock          locked by the process that writes
    """

    def __init__(self, folder: Path, about: dict[str, Any], task: Task, recipe: Recipe, processor: Processor) -> None:
        self.folder, self.about, self.task, self.recipe, self.processor = folder, about, task, recipe, processor

    @staticmethod
    def create(
        folder: Path, task: Task, recipe: Recipe, sources: Sources, processor: Processor, examples: Examples
    ) -> Run:
        """Create a new run; an existing run is never overwritten."""
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
        run.write_about()  # last: run.json marks a complete directory
        return run

    @staticmethod
    def open(folder: Path | str) -> Run:
        """Open a run directory, an exported one, or the run of this name included in the package."""
        folder = Path(folder)
        if not folder.exists() and str(folder) in SHIPPED:
            folder = EMBEDDED / folder
        if not folder.exists():
            raise UserError(f"{folder}: no such run; create one with regard train TASK --out {folder}")
        if not (folder / "run.json").exists():
            raise UserError(
                f"{folder}: not a run directory (no run.json); pass a directory written by regard train --out or "
                "regard export"
            )
        about, known = read_about(folder), tasks()
        with name_in_errors(folder / "run.json"):
            if about["task"] not in known:
                raise UserError(f"unknown task {short_repr(about['task'])}; known tasks are {', '.join(known)}")
            task = build(known[about["task"]], about["options"], "options")
            recipe = build(Recipe, about["recipe"], "recipe")
        return Run(folder, about, task, recipe, Processor.load(folder))

    def write_about(self) -> None:
        """Write run.json."""
        with _explain_full_disk(self.folder):
            write_text_atomically(self.folder / "run.json", json.dumps(self.about, indent=1, ensure_ascii=False))

    def keep_results(self, results: dict[str, Any]) -> None:
        """Write results to run.json; raise `RunLocked` if a training is active or has replaced the weights."""
        with lock_run(self.folder):
            best = self.folder / "best.safetensors"
            if best.exists():
                with name_in_errors(best):
                    if _step(read_notes(best)) != results["step"]:
                        raise RunLocked(f"{best}: was replaced during the evaluation; run the command again")
            self.about = read_about(self.folder) | {"results": results}
            self.write_about()

    def checkpoints(self) -> list[Path]:
        """Paths of the checkpoints, newest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"), reverse=True)

    def save(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """Write a checkpoint as one file. Older ones are deleted only after it is safe on disk."""
        path = self.folder / "checkpoints" / f"step-{progress.step:08}.safetensors"
        path.parent.mkdir(exist_ok=True)
        self._write(path, tensors, progress)
        self._remove_old_checkpoints()
        return path

    def save_shard(self, tensors: dict[str, Tensor], progress: Progress) -> Path:
        """Write a sharded checkpoint: a directory to which every process writes its shard."""
        from regard.training import sharded_checkpoint

        path = self.folder / "checkpoints" / f"step-{progress.step:08}"
        path.parent.mkdir(exist_ok=True)
        with _explain_full_disk(self.folder):
            sharded_checkpoint.save(path, tensors, {"progress": json.dumps(asdict(progress))})
        self._remove_old_checkpoints()
        return path

    def _remove_old_checkpoints(self) -> None:
        """Delete old checkpoints; another process may delete the same ones."""
        for old in self.checkpoints()[KEEP:]:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)

    def remove_partial_files(self) -> None:
        """Delete partial files of a killed training. Only the main process may call this."""
        for folder in (self.folder, self.folder / "checkpoints"):
            remove_partial_files(folder)

    def latest(
        self, on_skip: Callable[[str], None] = lambda line: None, read: Read | None = None
    ) -> tuple[dict[str, Tensor], Progress] | None:
        """Read the newest readable checkpoint; `on_skip` is called with a message for each unreadable one."""
        paths = self.checkpoints()
        for path, older in zip(paths, [*paths[1:], None], strict=False):
            try:
                tensors, notes = (read or load)(path)
                return tensors, read_progress(Progress, notes)
            except Exception as error:  # any damage: try the next one
                fallback = f"; trying {older.name} instead" if older is not None else ""
                on_skip(f"{path}: cannot be read ({first_line(error)}){fallback}")
        if paths:
            raise UserError(f"{paths[0].parent}: no checkpoint can be read; start another run")
        return None

    def keep_best(self, weights: dict[str, Tensor], progress: Progress) -> None:
        """Save the weights to predict with."""
        self._write(self.folder / "best.safetensors", weights, progress)

    def _write(self, path: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
        from safetensors.torch import save_file

        notes = {"progress": json.dumps(asdict(progress))}
        notes[checksum.NAME] = checksum.of_tensors(tensors, notes)
        with _explain_full_disk(self.folder):
            write_atomically(path, lambda temporary: save_file(tensors, str(temporary), notes))

    def best_problem(self) -> str:
        """Describe the damage of the best weights; empty if they can be read."""
        path = self.folder / "best.safetensors"
        try:
            load(path)
        except Exception as error:  # any damage
            return f"{path}: {f'cannot be read ({first_line(error)})' if path.exists() else 'is missing'}"
        return ""

    def minutes(self) -> float:
        """Total duration of all steps."""
        if self.exported:
            return self.about["exported"]["minutes"]
        return sum(line.get("seconds", 0.0) for line in read_lines(self.folder / "log.jsonl")) / 60

    @property
    def exported(self) -> bool:
        """Whether the run is exported: read-only, without checkpoints to resume from."""
        return self.about.get("exported") is not None

    def model(self, *, frozen: bool = False) -> tuple[nn.Module, int]:
        """Load the model with its best weights, in eval mode, and the step of these weights.

        frozen: pack the weights for inference (`regard.nn.freeze`).
        """
        with stage("loading the model"):
            return self._model(frozen)

    def _model(self, frozen: bool) -> tuple[nn.Module, int]:
        if self.exported:
            return self._exported_model(frozen), self.about["exported"]["step"]
        path = self.folder / "best.safetensors"
        if path.exists():
            with name_in_errors(path, f"regard resume {self.folder} rewrites it"):
                shapes = shapes_of(path)
                self.check_model(path, shapes)
                weights, notes = load(path)
                step = _step(notes)
        else:
            checkpoint = self.latest()
            if checkpoint is None:
                raise UserError(f"{self.folder}: not trained yet; train with regard resume {self.folder}")
            tensors, progress = checkpoint
            prefix = "average." if any(name.startswith("average.") for name in tensors) else "model."
            weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            self.check_model(self.folder / "checkpoints", {name: tuple(x.shape) for name, x in weights.items()})
            step = progress.step
        with name_in_errors(self.folder), torch.random.fork_rng():
            model = self.task.model(self.processor)
            model.load_state_dict(weights)
        if frozen:
            freeze(model)
        return model.eval(), step

    def check_model(self, path: Path, shapes: Shapes) -> None:
        """Raise if the model of run.json, processor.json and tokenizer.json does not match the tensors of a file."""
        with name_in_errors(f"{self.folder}/run.json or processor.json"):
            model = build_on_meta(lambda: self.task.model(self.processor), tensor_count=len(shapes))
        with name_in_errors(path, "are these files from the same run?"):
            check_model(model, shapes)

    def check_checkpoint(self) -> None:
        """`check_model` on the newest readable checkpoint, before a training builds its model."""
        for path in self.checkpoints():
            try:
                shapes = shapes_of(path)
            except Exception:  # `latest` reports it
                continue
            model_shapes = {
                name.removeprefix("model."): shape for name, shape in shapes.items() if name.startswith("model.")
            }
            self.check_model(path, model_shapes)
            break

    def _exported_model(self, frozen: bool) -> nn.Module:
        from regard.models import load as load_checkpoint

        with name_in_errors(self.folder, "export the run again"):
            return load_checkpoint(self.folder, dtype=torch.float32, frozen=frozen)

    def calibrate(self, rows: Sequence[Row]) -> None:
        """Calibrate the trained model on validation rows, and save the processor if it changed."""
        model, _ = self.model(frozen=True)
        with stage("calibrating"):
            processor = self.task.calibrate(model, self.processor, rows)
        if processor is not self.processor:
            self.processor = processor
            with _explain_full_disk(self.folder):
                write_text_atomically(self.folder / "processor.json", processor.to_json())


class Log:
    """log.jsonl and TensorBoard, one entry per step; entries after `step`, where the run continues, are removed."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "log.jsonl"
        kept = [line for line in read_lines(path) if line["step"] <= step]
        with _explain_full_disk(folder):
            write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = path.open("a", buffering=1, encoding="utf-8")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def __call__(self, step: int, **values: float) -> None:
        self.file.write(json.dumps({"step": step} | values) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        self.board.close()


@contextmanager
def _explain_full_disk(run: Path) -> Iterator[None]:
    """Convert a full-disk error in this context to a `UserError` that explains how to continue the run."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = shutil.disk_usage(run).free / 1e6
        raise UserError(
            f"{run}: the disk is full ({free:.0f} MB free); earlier files are intact; free some space, then "
            f"regard resume {run}"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full; safetensors reports it only in the message."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    return type(error).__name__ == "SafetensorError" and any(f"(os error {n})" in str(error) for n in NO_ROOM)


def _step(notes: dict[str, str]) -> int:
    return read_progress(Progress, notes).step


@contextmanager
def reserve_folder(folder: Path, task: str) -> Iterator[None]:
    """Lock a directory while a run is created in it. On failure the directory is restored."""
    check_vacant(folder, task)
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with lock_run(folder):
        check_vacant(folder, task)  # another process may have created a run before this one got the lock
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
    """Raise unless a run can be created here: the directory is empty, or has a run of this task without steps."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; choose another --out")
    if (folder / "run.json").exists():
        try:
            existing = read_about(folder)["task"]
        except UserError:
            raise UserError(f"{folder}: contains a run whose run.json cannot be read; choose another --out") from None
        if existing != task or (folder / "config.json").exists() or has_steps(folder):  # config.json: an exported run
            raise UserError(
                f"{folder}: contains a run of {existing}; continue with regard resume {folder}, or choose another --out"
            )
        return
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    # Files that a process left behind if it was killed while creating a run.
    leftovers = {LOCK, *WRITTEN, *(name for name in names if name.startswith(".") and name.endswith(".part"))}
    if names and not (LOCK in names and names <= leftovers):
        raise UserError(f"{folder}: is not empty and not a run directory; choose another --out")


def has_steps(folder: Path) -> bool:
    """Whether the run in a directory has made a step, so that work would be lost."""
    kept = [path.name.partition(".")[0] for path in (folder / "checkpoints").glob("step-*")]
    return (
        (folder / "best.safetensors").exists()
        or any(name != f"step-{0:08}" for name in kept)
        or any(line["step"] for line in read_lines(folder / "log.jsonl"))
    )


def _remove_run(folder: Path) -> None:
    """Delete the files of a run without steps; run.json first, since it marks a complete directory."""
    for path in (folder / name for name in WRITTEN):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    remove_partial_files(folder)


def environment() -> dict[str, Any]:
    """Versions and settings that affect bitwise reproducibility."""
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
