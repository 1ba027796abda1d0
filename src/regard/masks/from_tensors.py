"""Masks built from tensors: they keep these tensors and notice in-place changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.fingerprint import fingerprint, unwrap, without_transforms
from regard.geometry import CallSlice, Frame, Indices
from regard.masks.algebra import Boxes, Intervals, Kinds, Mask
from regard.masks.compiled import snapshot_in_graph


@dataclass(frozen=True, eq=False, repr=False)
class FromTensors(Mask):
    """The mask `build(*given)`, rebuilt from copies whenever the content of a given tensor changes."""

    build: Callable[..., Mask]
    given: tuple[Any, ...]

    def snapshot(self) -> Mask:
        return snapshot_in_graph(self) if torch.compiler.is_compiling() else self.read()

    def read(self) -> Mask:
        now = _fingerprints(self.given)
        known, mask = self.__dict__.get("_known", (None, None))
        if mask is None or now is None or now != known:
            with nullcontext() if now is None else without_transforms():
                mask = self.build(*map(_copy, self.given))
            object.__setattr__(self, "_known", (now, mask))  # one assignment, for other threads
            object.__setattr__(self, "_snapshot", mask)
        return mask

    @property
    def live(self) -> bool:
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([value for value in self.given if isinstance(value, Tensor)])

    def content(self) -> None:
        return None  # only a snapshot has constant content

    def __hash__(self) -> int:
        return hash(self.snapshot())

    def allows(self, at: Indices) -> Tensor:
        return self.snapshot().allows(at)

    def kinds(self, boxes: Boxes) -> Kinds:
        return self.snapshot().kinds(boxes)

    def intervals(self, frame: Frame) -> Intervals | None:
        return self.snapshot().intervals(frame)

    def check(self, frame: Frame) -> None:
        self.snapshot().check(frame)

    def extent(self, frame: Frame) -> tuple[int, int]:
        return self.snapshot().extent(frame)

    def narrow(self, frame: Frame, part: CallSlice) -> Mask:
        return self.snapshot().narrow(frame, part)

    def preview_size(self) -> int:
        return self.snapshot().preview_size()

    def expected_size(self) -> tuple[int, int] | None:
        return self.snapshot().expected_size()

    @property
    def opaque(self) -> bool:
        return self.snapshot().opaque

    def __repr__(self) -> str:
        return repr(self.snapshot())


def from_tensors(build: Callable[..., Mask], *given: Any) -> Mask:
    """Return `build(*given)`; if tensors or numpy arrays are given, a mask that keeps them and notices changes.

    Lists and numbers are read once.
    """
    if torch.compiler.is_compiling():
        mask = build(*given)  # from tensors of the graph
        object.__setattr__(mask, "_traced", True)
        return mask
    held = tuple(map(_as_tensor, given))
    if not any(isinstance(value, Tensor) for value in held):
        with nullcontext() if any(map(_lists_tensors, held)) else without_transforms():
            return build(*held)
    mask = FromTensors(build, held)
    mask.snapshot()  # raises on invalid values
    return mask


def _lists_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value)


def _as_tensor(value: Any) -> Any:
    """Return a tensor as it is, an array as a tensor that shares its memory, anything else as a copy."""
    if isinstance(value, Tensor):
        if value.is_nested:
            raise TypeError("a mask needs dense tensors, got a nested tensor; stack or pad its parts")
        return value
    if isinstance(value, np.ndarray):
        with warnings.catch_warnings(), suppress(TypeError):  # read-only or non-numeric arrays
            warnings.simplefilter("ignore")
            return torch.from_numpy(value)
    return tuple(value) if isinstance(value, Iterator) else copy(value)


def _fingerprints(given: tuple[Any, ...]) -> tuple | None:
    contents = tuple(fingerprint(value) for value in given if isinstance(value, Tensor))
    return None if None in contents else contents


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = unwrap(value).detach()
    return value.clone(memory_format=torch.contiguous_format) if value.layout == torch.strided else value
