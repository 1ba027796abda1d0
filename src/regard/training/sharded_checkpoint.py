"""Checkpoints of weights that processes share: a folder, a safetensors file of each; by torch.distributed.checkpoint.

Any number of processes read what any other number wrote, and one process without a group of them does too.
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
    """Every process writes its part of the tensors. The folder is there whole, or not at all."""
    beside, first = folder.with_name(f".{folder.name}.part"), not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(exist_ok=True)
    _agreed(lambda: dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(beside), save_distributed=True)))
    if first:
        about = {"files": {path.name: checksum.of_file(path) for path in sorted(beside.iterdir())}, **notes}
        about[checksum.NAME] = checksum.of_notes(about)
        (beside / NOTES).write_text(json.dumps(about, indent=1), encoding="utf-8")
        for path in (beside / NOTES, beside):
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # one that could not be read, and was passed over
        os.replace(beside, folder)
        sync(folder.parent)
    if dist.is_initialized():
        dist.barrier()


def load(folder: Path, into: dict[str, Tensor] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and notes of a folder: whole, or `into` those of which each process has a part."""
    notes = _notes(folder)
    said = notes.pop(checksum.NAME, None)
    if said is not None and said != checksum.of_notes(notes):
        raise ValueError(f"{NOTES}: {checksum.DAMAGED}")
    alone = into is None
    _check(folder, notes.pop("files"), together=not alone and dist.is_initialized())
    reader = dcp.HuggingFaceStorageReader(str(folder))
    if into is None:
        kept: Any = reader.read_metadata().state_dict_metadata
        into = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in kept.items()}
    tensors = into
    _agreed(lambda: dcp.load(tensors, storage_reader=reader, no_dist=alone or not dist.is_initialized()))
    return tensors, notes


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a folder."""
    _notes(folder)
    for path in folder.iterdir():
        require_file(path)
    kept: Any = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in kept.items()}


def _notes(folder: Path) -> dict[str, Any]:
    notes = read_json(folder / NOTES)
    if not isinstance(notes, dict) or not isinstance(notes.get("files"), dict):
        raise ValueError(f"{NOTES} must be an object with files, but is {short_repr(notes)}")
    return notes


def _check(folder: Path, files: dict[str, Any], *, together: bool) -> None:
    """Raise if a file is missing or damaged; together, each process reads some of them, and all raise alike."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    wrong = None
    for name, said in list(files.items())[rank::world]:
        path = path_inside(folder, name)
        # Earlier versions noted the size.
        if not path.exists() or said != (
            require_file(path).stat().st_size if isinstance(said, int) else checksum.of_file(path)
        ):
            wrong = f"{name} is missing or not as it was written"
            break
    heard = [wrong] * world
    if together:
        dist.all_gather_object(heard, wrong)
    if first := next(filter(None, heard), None):
        raise ValueError(first)


def _agreed(work: Callable[[], Any]) -> None:
    """What failed in one process fails in all; the first failure tells why."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            work()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise cause from error
        raise ValueError(str(cause)) from error
