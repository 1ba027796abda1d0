"""The frame of a whole call, and the tensors that a description holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from regard.arguments import read_offset
from regard.attention import Attention
from regard.description import Description
from regard.geometry import Frame
from regard.masks import Mask
from regard.positions.biases import Bias
from regard.scores import Modified, Score


def full_frame(attend: Attention, B: int, H: int, Q: int, K: int) -> Frame:
    """The frame of the whole call."""
    offset = K - Q if attend.offset is None else read_offset(attend.offset)
    return Frame(B, H, Q, K, offset)


def learned_tensors(attend: Attention, device: torch.device) -> list[Tensor]:
    """The description's tensors that may require grad, each once; those that a score function closes over too."""
    assert isinstance(attend.score, Score)
    found = list(attend.score.tensors())
    if isinstance(attend.bias, Bias):
        found += attend.bias.tensors()
    if isinstance(attend.sink, Tensor):
        found.append(attend.sink)
    found += closure_tensors(attend.score, device)
    for part in (attend.score, attend.bias):
        if isinstance(part, Description):
            found += part.hidden_tensors()
    return list({id(tensor): tensor for tensor in found}.values())


def closure_tensors(score: Any, device: torch.device) -> Iterator[Tensor]:
    """The leaves that require grad behind what a score function makes of a score that does not."""
    if not isinstance(score, Modified):
        return
    places = torch.zeros(4, 1, 1, 1, 1, dtype=torch.int64, device=device)
    with torch.enable_grad():
        changed = score.function(torch.zeros(1, 1, 1, 1, device=device), *places)
    waiting, seen = [changed.grad_fn] if isinstance(changed, Tensor) else [], set()
    if isinstance(changed, Tensor) and changed.is_leaf and changed.requires_grad:
        yield changed
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [before for before, _ in node.next_functions]
    yield from closure_tensors(score.score, device)


def description_digest(value: Any) -> int:
    """A number that two ranks have in common if they describe the same; values of learned tensors do not count."""
    if isinstance(value, Mask):
        value = value.snapshot()
    if isinstance(value, Tensor):
        known = repr((value.dtype, tuple(value.shape))).encode()
        return zlib.crc32(known if value.is_floating_point() else known + value.cpu().numpy().tobytes())
    if is_dataclass(value) and not isinstance(value, type):
        inside = [description_digest(getattr(value, field.name)) for field in fields(value)]
        return zlib.crc32(repr((type(value).__name__, inside)).encode())
    if isinstance(value, tuple):
        return zlib.crc32(repr([description_digest(one) for one in value]).encode())
    return zlib.crc32((value.__qualname__ if hasattr(value, "__qualname__") else repr(value)).encode())
