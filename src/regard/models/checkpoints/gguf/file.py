"""Metadata and tensors of a GGUF file.

The header is parsed here rather than by `gguf.GGUFReader`, which believes the lengths in a file (an array that claims
2**60 numbers exhausts the memory) and takes seconds for the strings of a vocabulary. Types, block sizes and
dequantisation are those of the `gguf` package.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.files import is_regular, require_file
from regard.printable import printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
MAX_DEPTH, MAX_AXES, MAX_AXIS = 4, 4, 1 << 40
UINT32, UINT64 = Struct("<I"), Struct("<Q")


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file with the suffix .gguf or the magic number of such files."""
    if not is_regular(path):
        return False
    if Path(path).suffix.lower() == ".gguf":
        return True
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class StoredTensor(NamedTuple):
    """Where a tensor is in the file: type, shape in torch's order, offset and size in bytes."""

    type: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """A GGUF file: `metadata` by key, and tensors that are read on demand. Every length in the file is checked.

    Arrays of numbers in the metadata are numpy arrays, other arrays are lists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = require_file(path)
        try:
            import gguf
        except ImportError:
            raise ImportError("GGUF files need the gguf library: pip install 'regard[gguf]'") from None
        self._gguf = gguf
        with self.path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:  # an empty file
                raise ValueError(f"{path} is not a GGUF file: it is empty") from None
        try:
            self._parse()
        except ValueError as error:
            raise ValueError(f"{path} is not a valid GGUF file: {printable(error)[:300]}") from None

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """Return the storage type of a tensor, such as "Q4_0" or "F32"."""
        return self._tensors[name].type.name

    def blocks(self, name: str) -> Tensor:
        """Return a copy of the stored bytes of a tensor: uint8 (rows, bytes per row), whole blocks along each row."""
        stored = self._tensors[name]
        copied = bytearray(self._data[stored.offset : stored.offset + stored.size])
        return torch.frombuffer(copied, dtype=torch.uint8).view(prod(stored.shape[:-1]), -1)

    def dequantize(self, name: str, blocks: Tensor) -> Tensor:
        """Convert rows in the storage type of a tensor, (rows, bytes per row), to float32 (rows, columns)."""
        stored = self._tensors[name]
        try:
            values = self._gguf.quants.dequantize(blocks.numpy(), stored.type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: {name} has the type {stored.type.name}, which cannot be read; use a file "
                "of another type, such as Q8_0 or Q4_0"
            ) from None
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))

    def read(self, name: str) -> Tensor:
        """Return a tensor as float32."""
        return self.dequantize(name, self.blocks(name)).view(self.shape(name))

    def _parse(self) -> None:
        reader = _Reader(self._data)
        if reader.take(4) != MAGIC:
            raise ValueError(f"it does not start with {MAGIC.decode()}")
        if (version := reader.uint32()) not in VERSIONS:
            raise ValueError(
                f"expected version {' or '.join(map(str, VERSIONS))} in little-endian order, got {version}"
            )
        tensor_count, field_count = reader.uint64(), reader.uint64()
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = reader.string()
            if key in self.metadata:
                raise ValueError(f"duplicate key {key[:80]!r}")
            self.metadata[key] = reader.value(reader.uint32())
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ValueError(
                "it is one of several parts; join them with llama.cpp's `llama-gguf-split --merge` and pass the result"
            )
        stored = [self._tensor(reader) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 1 << 20:
            raise ValueError(f"general.alignment must be a positive number, got {alignment!r:.40}")
        start = -(-reader.position // alignment) * alignment
        self._tensors: dict[str, StoredTensor] = {}
        for name, tensor in stored:
            if name in self._tensors:
                raise ValueError(f"duplicate tensor {name[:80]!r}")
            tensor = tensor._replace(offset=start + tensor.offset)
            if tensor.offset + tensor.size > len(self._data):
                raise ValueError(f"{name[:80]} ends after the end of the file; was the download complete?")
            self._tensors[name] = tensor

    def _tensor(self, reader: _Reader) -> tuple[str, StoredTensor]:
        """Read the entry of a tensor; its offset is relative to the first tensor."""
        name, axes = reader.string(), reader.uint32()
        if not 1 <= axes <= MAX_AXES:
            raise ValueError(f"{name[:80]!r} must have 1 to {MAX_AXES} axes, got {axes}")
        shape = tuple(reader.uint64() for _ in range(axes))[::-1]
        number, offset = reader.uint32(), reader.uint64()
        if not all(0 < size <= MAX_AXIS for size in shape):
            raise ValueError(f"{name[:80]!r} has the shape {shape}")
        try:
            kind = self._gguf.GGMLQuantizationType(number)
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ValueError(f"{name[:80]!r} has the unknown type {number}") from None
        if shape[-1] % block:
            raise ValueError(
                f"rows of {name[:80]!r} must be a multiple of {block} long for {kind.name}, got {shape[-1]}"
            )
        return name, StoredTensor(kind, shape, offset, prod(shape) // block * size)


class _Reader:
    """A position in the header; reading beyond the end raises."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> bytes:
        self._require(count)
        self.position += count
        return self.data[self.position - count : self.position]

    def uint32(self) -> int:
        return UINT32.unpack(self.take(4))[0]

    def uint64(self) -> int:
        return UINT64.unpack(self.take(8))[0]

    def string(self) -> str:
        return self.take(self.uint64()).decode("utf-8")  # UnicodeDecodeError is a ValueError

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(depth)
        return self._numbers(kind, 1)[0].item()

    def _array(self, depth: int) -> Any:
        kind, count = self.uint32(), self.uint64()
        if kind in SCALARS:
            return self._numbers(kind, count)
        if depth >= MAX_DEPTH:
            raise ValueError("its arrays are nested too deeply")
        self._require(8 * count)  # a string or an array takes at least 8 bytes
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in SCALARS:
            raise ValueError(f"unknown type {kind} of a value")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def _require(self, count: int) -> None:
        if count > len(self.data) - self.position:
            raise ValueError("it ends within the header; was the download complete?")
