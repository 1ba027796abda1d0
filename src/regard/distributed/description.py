"""The frame of a full call, and the tensors of a description."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from regard.arguments import read_offset
from regard.attention import Attention
from regard.geometry import Frame
from regard.masks import Mask
from regard.scores import Modified


def full_frame(attend: Attention, B: int, H: int, Q: int, K: int) -> Frame:
    """The frame of the full call, over all ranks."""
    offset = K - Q if attend.offset is None else read_offset(attend.offset)
    return Frame(B, H, Q, K, offset)


def learned_tensors(attend: Attention, device: torch.device) -> list[Tensor]:
    """The tensors of a description that may require grad, each once, including closures of score functions."""
    parts = [part for part in (attend.score, attend.bias) if part is not None]
    tensors = [tensor for part in parts for tensor in part.tensors()]
    if isinstance(attend.sink, Tensor):
        tensors.append(attend.sink)
    tensors += closure_tensors(attend.score, device)
    for part in parts:
        tensors += part.hidden_tensors()
    return list({id(tensor): tensor for tensor in tensors}.values())


def closure_tensors(score: Any, device: torch.device) -> Iterator[Tensor]:
    """The leaf tensors that require grad and that a score function closes over."""
    if not isinstance(score, Modified):
        return
    indices = torch.zeros(4, 1, 1, 1, 1, dtype=torch.int64, device=device)
    with torch.enable_grad():
        modified = score.function(torch.zeros(1, 1, 1, 1, device=device), *indices)
    pending, seen = [modified.grad_fn] if isinstance(modified, Tensor) else [], set()
    if isinstance(modified, Tensor) and modified.is_leaf and modified.requires_grad:
        yield modified
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        pending += [before for before, _ in node.next_functions]
    yield from closure_tensors(score.score, device)


def description_digest(value: Any) -> int:
    """A checksum to compare descriptions between ranks; values of floating-point tensors are ignored."""
    if isinstance(value, Mask):
        value = value.snapshot()
    if isinstance(value, Tensor):
        header = repr((value.dtype, tuple(value.shape))).encode()
        return zlib.crc32(header if value.is_floating_point() else header + value.cpu().numpy().tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        inside = [description_digest(getattr(value, field.name)) for field in fields(value)]
        return zlib.crc32(repr((type(value).__name__, inside)).encode())
    if isinstance(value, tuple):
        return zlib.crc32(repr([description_digest(one) for one in value]).encode())
    return zlib.crc32((value.__qualname__ if hasattr(value, "__qualname__") else repr(value)).encode())
