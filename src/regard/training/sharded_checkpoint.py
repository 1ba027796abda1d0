"""Sharded checkpoints: a directory with one safetensors file per process, by torch.distributed.checkpoint.

They can be read by any number of processes, also by a single one without a process group.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from regard.field_types import short_repr
from regard.files import read_json, require_file, sync
from regard.models.checkpoints.files import path_inside
from regard.training import checksum

NOTES = "notes.json"


def save(folder: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """Write the shard of every process. The directory appears complete, or not at all."""
    partial, first = folder.with_name(f".{folder.name}.part"), not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
    _raise_together(
        lambda: dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True))
    )
    if first:
        about = {"files": {path.name: checksum.of_file(path) for path in sorted(partial.iterdir())}, **notes}
        about[checksum.NAME] = checksum.of_notes(about)
        (partial / NOTES).write_text(json.dumps(about, indent=1), encoding="utf-8")
        for path in (partial / NOTES, partial):
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # an unreadable one that was skipped
        os.replace(partial, folder)
        sync(folder.parent)
    if dist.is_initialized():
        dist.barrier()


def load(folder: Path, into: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a directory: full tensors, or shards if `into` has sharded tensors to fill."""
    notes = _read_notes(folder)
    expected = notes.pop(checksum.NAME, None)
    if expected is not None and expected != checksum.of_notes(notes):
        raise ValueError(f"{NOTES}: {checksum.DAMAGED}")
    alone = into is None
    _check_files(folder, notes.pop("files"), together=not alone and dist.is_initialized())
    reader = dcp.HuggingFaceStorageReader(str(folder))
    if into is None:
        saved: Any = reader.read_metadata().state_dict_metadata
        into = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in saved.items()}
    tensors = into
    _raise_together(lambda: dcp.load(tensors, storage_reader=reader, no_dist=alone or not dist.is_initialized()))
    return tensors, notes


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a directory."""
    _read_notes(folder)
    for path in folder.iterdir():
        require_file(path)
    saved: Any = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in saved.items()}


def _read_notes(folder: Path) -> dict[str, Any]:
    notes = read_json(folder / NOTES)
    if not isinstance(notes, dict) or not isinstance(notes.get("files"), dict):
        raise ValueError(f"{NOTES} must be an object with files, got {short_repr(notes)}")
    return notes


def _check_files(folder: Path, files: dict[str, Any], *, together: bool) -> None:
    """Raise if a file is missing or damaged. together: processes divide the files, and all raise the same error."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    problem = None
    for name, expected in list(files.items())[rank::world]:
        path = path_inside(folder, name)
        # Earlier versions saved the size instead of a checksum.
        if not path.exists() or expected != (
            require_file(path).stat().st_size if isinstance(expected, int) else checksum.of_file(path)
        ):
            problem = f"{name} is missing or damaged"
            break
    problems = [problem] * world
    if together:
        dist.all_gather_object(problems, problem)
    if first := next(filter(None, problems), None):
        raise ValueError(first)


def _raise_together(work: Callable[[], Any]) -> None:
    """Run a collective operation; if it fails in one process, raise the first failure in all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            work()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise cause from error
        raise ValueError(str(cause)) from error
