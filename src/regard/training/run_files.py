"""Reading and checking of the files of a run directory. Any defect raises a `UserError` that names the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.data.saved_files import build, check_values, name_in_errors, read_object
from regard.errors import UserError
from regard.field_types import check_value, short_repr
from regard.files import read_text, require_file
from regard.printable import printable
from regard.training import checksum

Shapes = Mapping[str, tuple[int, ...]]
ABOUT: dict[str, Any] = {
    "task": str, "options": dict[str, Any], "recipe": dict[str, Any], "sources": dict[str, Any],
    "machine": dict[str, str | int], "results": dict[str, Any], "split": str | None, "command": list[Any] | None,
    "began": str | None, "rows": dict[str, int], "exported": dict[str, int | float] | None,
}  # fmt: skip
SOURCES: dict[str, Any] = {
    "data": list[str], "validation": list[str], "test": list[str], "held_out": int, "skip_bad": bool,
    "files": list[dict[str, str | int]],
}  # fmt: skip
FORMAT = 2  # version of run.json and processor.json
MAX_BUFFERS = 1 << 30  # bytes of buffers that a model may compute in addition to the tensors of its file


def read_about(folder: Path) -> dict[str, Any]:
    """Read run.json and check the types of its values."""
    path = folder / "run.json"
    about = read_object(path)
    with name_in_errors(path):
        if (version := about.get("format")) != FORMAT:
            raise UserError(
                f"expected format {FORMAT}, got {short_repr(version)}; train the run again with this version"
            )
        check_values(about, ABOUT)
        check_values(about["sources"], SOURCES, "sources.")
        for each in about["sources"]["files"]:
            check_value("sources.files.source", each.get("source"), str)
        if (exported := about.get("exported")) is not None:
            check_value("exported.step", exported.get("step"), int)
            check_value("exported.minutes", exported.get("minutes"), float)
        results = about["results"]
        check_value("results.step", results.get("step"), int | None)
        check_value("results.minutes", results.get("minutes"), float | None)
    return about


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; an incomplete last line is left out."""
    lines = read_text(path).splitlines() if path.exists() else []
    for n, line in enumerate(lines, 1):
        with name_in_errors(path, "delete the line, or the file"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if n == len(lines):
                    return
                raise ValueError(f"line {n} is not valid JSON: {str(error)[:200]}") from None
            if not isinstance(record, dict):
                raise ValueError(f"line {n} must be a JSON object, got {short_repr(record)}")
            check_value(f"step of line {n}", record.get("step"), int)
            check_value(f"seconds of line {n}", record.get("seconds", 0.0), float)
        yield record


def read_progress(kind: Any, notes: Mapping[str, str]) -> Any:
    """Parse the progress in the metadata of a checkpoint."""
    values = json.loads(notes["progress"])
    best = values.pop("best", math.inf)
    if isinstance(best, bool) or not isinstance(best, float | int) or math.isnan(best):
        raise ValueError(f"progress.best must be a number or infinity, got {short_repr(best)}")
    progress = build(kind, values, "progress")
    if min(progress.step, progress.epoch, progress.batch, progress.stale) < 0:
        raise ValueError(f"progress must not be negative, got {short_repr(values)}")
    return replace(progress, best=float(best))


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, without reading the tensors."""
    from safetensors import safe_open

    if path.is_dir():
        from regard.training import sharded_checkpoint

        return sharded_checkpoint.shapes_of(path)
    with safe_open(str(require_file(path)), "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a checkpoint, a file or a sharded directory, and verify its checksum."""
    from safetensors import safe_open

    if path.is_dir():
        from regard.training import sharded_checkpoint

        return sharded_checkpoint.load(path)

    with safe_open(str(require_file(path)), "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    expected = notes.pop(checksum.NAME, None)  # runs of earlier versions have none
    if expected is not None and expected != checksum.of_tensors(tensors, notes):
        raise ValueError(checksum.DAMAGED)
    return tensors, notes


def read_notes(path: Path) -> dict[str, str]:
    """Read only the metadata of a file."""
    from safetensors import safe_open

    with safe_open(str(require_file(path)), "pt") as file:
        return file.metadata() or {}


def check_model(model: nn.Module, shapes: Shapes) -> None:
    """Raise ValueError if a model on "meta" has tensors of other shapes, or too large buffers."""
    stored = model.state_dict(keep_vars=True)
    for name in sorted({*stored, *shapes}):
        wanted = tuple(stored[name].shape) if name in stored else None
        if wanted != shapes.get(name):
            raise ValueError(
                "its tensors are not those of the model that run.json, processor.json and tokenizer.json describe: "
                f"{printable(name)} is {shapes.get(name, 'missing')}, but in the model it is {wanted or 'missing'}"
            )
    saved = {id(tensor) for tensor in stored.values()}
    extra = sum(tensor.nbytes for tensor in model.buffers() if id(tensor) not in saved)
    if extra > MAX_BUFFERS:
        raise ValueError(f"run.json and processor.json describe a model that computes buffers of {extra} bytes")
