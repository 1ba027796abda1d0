"""Checksums of checkpoints, to detect corruption on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.files import require_file

NAME = "sha256"
DAMAGED = "damaged: the checksum does not match the content"


def of_notes(notes: Mapping[str, Any]) -> str:
    """Checksum of JSON metadata."""
    return hashlib.sha256(json.dumps(notes, sort_keys=True).encode()).hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> str:
    """Checksum of names, dtypes, shapes and values of tensors, and of metadata."""
    digest = hashlib.sha256(of_notes(notes).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_file(path: Path) -> str:
    """Checksum of the bytes of a file."""
    with require_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
