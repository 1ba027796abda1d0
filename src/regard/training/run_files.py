"""The files of a run directory, read and checked: anything wrong with one is a `UserError` that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.data.saved_files import build, check_values, naming, read_object
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
SPARE = 1 << 30  # bytes of tensors that a model may compute on top of those that its file holds


def read_about(folder: Path) -> dict[str, Any]:
    """What run.json says, each value of the right type."""
    path = folder / "run.json"
    about = read_object(path)
    with naming(path):
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
    """The lines of a log, each with its step; a last line that was cut short is left out."""
    held = read_text(path).splitlines() if path.exists() else []
    for n, line in enumerate(held, 1):
        with naming(path, "delete the line, or the file"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                if n == len(held):
                    return
                raise ValueError(f"line {n} is no JSON: {str(error)[:200]}") from None
            if not isinstance(found, dict):
                raise ValueError(f"line {n} must be a JSON object, but is {short_repr(found)}")
            check_value(f"step of line {n}", found.get("step"), int)
            check_value(f"seconds of line {n}", found.get("seconds", 0.0), float)
        yield found


def read_progress(kind: Any, notes: Mapping[str, str]) -> Any:
    """The progress that the notes of a checkpoint hold."""
    values = json.loads(notes["progress"])
    best = values.pop("best", math.inf)
    if isinstance(best, bool) or not isinstance(best, float | int) or math.isnan(best):
        raise ValueError(f"progress.best must be a number, or infinite, but is {short_repr(best)}")
    found = build(kind, values, "progress")
    if min(found.step, found.epoch, found.batch, found.stale) < 0:
        raise ValueError(f"progress must have no negative number, but is {short_repr(values)}")
    return replace(found, best=float(best))


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a checkpoint; nothing else is read."""
    from safetensors import safe_open

    if path.is_dir():
        from regard.training import sharded_checkpoint

        return sharded_checkpoint.shapes_of(path)
    with safe_open(str(require_file(path)), "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and notes of a file, or of a folder to which processes wrote their parts; whole, with their checksum."""
    from safetensors import safe_open

    if path.is_dir():
        from regard.training import sharded_checkpoint

        return sharded_checkpoint.load(path)

    with safe_open(str(require_file(path)), "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    said = notes.pop(checksum.NAME, None)  # runs of earlier versions have none
    if said is not None and said != checksum.of_tensors(tensors, notes):
        raise ValueError(checksum.DAMAGED)
    return tensors, notes


def read_notes(path: Path) -> dict[str, str]:
    """The notes of a file alone."""
    from safetensors import safe_open

    with safe_open(str(require_file(path)), "pt") as file:
        return file.metadata() or {}


def check_model(model: nn.Module, shapes: Shapes) -> None:
    """Raise ValueError unless a model without memory has tensors of these shapes, and few others."""
    stored = model.state_dict(keep_vars=True)
    for name in sorted({*stored, *shapes}):
        wanted = tuple(stored[name].shape) if name in stored else None
        if wanted != shapes.get(name):
            raise ValueError(
                "its tensors are not those of the model that run.json, processor.json and tokenizer.json describe: "
                f"{printable(name)} is {shapes.get(name, 'missing')}, but the model's is {wanted or 'missing'}"
            )
    held = {id(tensor) for tensor in stored.values()}
    spare = sum(tensor.nbytes for tensor in model.buffers() if id(tensor) not in held)
    if spare > SPARE:
        raise ValueError(f"run.json and processor.json describe a model that computes tables of {spare} bytes")
