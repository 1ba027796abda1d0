"""The compiled library: finding it, calling it, and how tensors are told to it. Nobody else knows it."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

INTERFACE = 8  # of csrc/regard.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ERRORS = {
    -1: (MemoryError, "the native engine found no memory to work in; fewer threads or shorter sequences need less"),
    -2: (ValueError, "the native engine was given what its interface does not allow"),
    -3: (ValueError, "the native engine cannot address so large a problem"),
}
TENSOR = "P4q"
PROBLEM = struct.Struct("@7q2i3d" + 3 * TENSOR + "2P3q" + "5P2q" + 3 * TENSOR + "2iq2PQ2Id" + TENSOR)
RESULT = struct.Struct("@" + 3 * TENSOR)
GRADIENT = struct.Struct("@" + 14 * TENSOR)
STATISTICS = struct.Struct("@" + 4 * TENSOR + "q2P" + TENSOR + "2Pq")
COLUMNS = struct.Struct("@" + TENSOR + "Pq")
POOL = struct.Struct("@" + TENSOR + "2q")
PRODUCT = struct.Struct("@5q4P2i")
LINEAR = struct.Struct("@6q4i" + 3 * TENSOR)
LINEAR_RESULT = struct.Struct("@" + 2 * TENSOR)
LINEAR_GRADIENT = struct.Struct("@" + 6 * TENSOR)
ABSENT = (0, 0, 0, 0, 0)
ADDRESS = struct.Struct("@P").pack
_LARGE = 1 << 22  # bytes in which at least one large page lies whole


@cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none. `REGARD_LIBRARY` names another file."""
    named = os.environ.get("REGARD_LIBRARY")
    folders = [Path(__file__).parents[2], *(Path(entry) / "regard" for entry in sys.path if entry)]
    files = [Path(named)] if named else [file for folder in folders for file in sorted(folder.glob("_native.*"))]
    files = [file for file in files if file.suffix in (".so", ".dylib", ".dll", ".pyd")]
    if not files:
        return "the compiled library is missing: no C++ compiler was found when regard was installed"
    try:
        found = ctypes.CDLL(str(files[0]))
        version = found.regard_interface()
    except (OSError, AttributeError) as error:
        return f"the compiled library does not load: {error}"
    if version != INTERFACE:
        return f"the compiled library has interface {version}, but {INTERFACE} is needed; reinstall regard"
    for name in ("regard_isa", "regard_isas_compiled", "regard_version"):
        getattr(found, name).restype = ctypes.c_char_p
    names = ("dot_forward", "dot_backward", "dot_look", "dot_weights", "dot_map", "linear_forward", "linear_backward")
    for name in (f"regard_{name}" for name in names):
        getattr(found, name).argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    long, pointer = ctypes.c_int64, ctypes.c_void_p
    found.regard_packed_size.restype, found.regard_packed_size.argtypes = long, [long, long]
    found.regard_multiply.argtypes = [ctypes.c_char_p]
    found.regard_prefer_large_pages.restype, found.regard_prefer_large_pages.argtypes = None, [pointer, long]
    return found


def missing() -> str:
    """Why there is no library, or nothing."""
    found = library()
    return found if isinstance(found, str) else ""


def about() -> dict[str, str]:
    """What one would paste into a bug report."""
    found = library()
    if isinstance(found, str):
        return {"native": found}
    return {
        "native": found._name,
        "instruction set": found.regard_isa().decode(),
        "compiled for": found.regard_isas_compiled().decode(),
        "threads": str(torch.get_num_threads()) if found.regard_has_threads() else "1 (built without OpenMP)",
    }


def call(name: str, *arguments: bytes | int) -> None:
    if status := getattr(library(), name)(*arguments):
        raise error(status, arguments[0])


def error(status: int, given: bytes | int = b"") -> Exception:
    kind, message = _ERRORS.get(status, (RuntimeError, f"the native engine failed with status {status}"))
    if isinstance(given, bytes) and len(given) == PROBLEM.size:
        sizes = zip("BHGQKDE", struct.unpack_from("@7q", given), strict=True)
        message += f": {', '.join(f'{axis}={n}' for axis, n in sizes)}, {torch.get_num_threads()} threads"
    return kind(message)


def fresh(tensor: Tensor) -> Tensor:
    """The same, all of which is about to be written: on large pages, since to begin small ones may cost more."""
    found = library()
    if tensor.nbytes >= _LARGE and not isinstance(found, str):
        found.regard_prefer_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def place(tensor: Tensor | None) -> tuple[int, ...]:
    """Address and strides, 0 along an axis of size 1."""
    if tensor is None:
        return ABSENT
    strides = [0 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.data_ptr(), *strides, *(0,) * (4 - len(strides))


def rows_of(tensor: Tensor | None) -> tuple[int, ...]:
    """The same for rows that lie close."""
    return ABSENT if tensor is None else (*place(tensor)[:4], 1)
