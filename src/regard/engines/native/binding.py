"""Loading and calling the compiled library, and passing tensors to it. No other module accesses the library."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.engines.mask_layout import TILE
from regard.engines.tensor_memory import NoMemory, data_address
from regard.engines.weight_formats import FORMATS, GROUP

INTERFACE = 13  # version of the interface, in csrc/regard.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}
NO_MASK, INTERVALS, TILES = 0, 1, 2  # kinds of a problem's mask
CHECKPOINT = 512  # tokens between the checkpoints of a recurrence
BFLOAT16_PRODUCTS = ("amx", "avx512bf16", "neonbf16")  # instruction sets that multiply bfloat16 numbers
INTEGER_PRODUCTS = ("amx", "avx512bf16")  # and int8 numbers
_ERRORS = {
    -1: (MemoryError, "the native engine could not allocate memory; use fewer threads or shorter sequences"),
    -2: (ValueError, "the native engine got an argument that its interface does not allow"),
    -3: (ValueError, "the native engine cannot address a problem of this size"),
    -4: (NoMemory, "the native engine got a tensor without memory: its storage was freed or never allocated"),
}
ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4, "silu": 5, "tanh": 6}
_NUMBERS = {
    **{name.upper(): n for name, n in ACTIVATIONS.items()},
    "FLOAT32": 0, "FLOAT64": 1, "BFLOAT16": 2, "FLOAT16": 3, "NO_MEMORY": -1, "BAD_ARGUMENT": -2, "TOO_LARGE": -3,
    "NO_DATA": -4, "TILE": TILE, "NO_MASK": NO_MASK, "INTERVALS": INTERVALS, "TILES": TILES,
    "SOFTMAX": 0, "SIGMOID": 1, "RELU_WEIGHTS": 2, "SQUARED_RELU_WEIGHTS": 3,
    "FEATURES": 0, "ELU": 1, "CHECKPOINT": CHECKPOINT, "GROUP": GROUP, "INT8": 4,
    **{f"PACKED_{name.upper()}": n for name, n in FORMATS.items()},
}  # fmt: skip


class Structure:
    """A structure of csrc/regard.h. `pack(*values)` takes the fields, with those of nested structures, in order.

    The library defines the layout: `fields` only lists the order of the values, and is compared with it.
    """

    known: ClassVar[dict[str, Structure]] = {}
    pack: Callable[..., bytes]
    size: int
    format: str
    offsets: dict[str, int]

    def __init__(self, name: str, fields: str) -> None:
        self.name, self.fields = f"regard_{name}", fields.split()
        self.known[self.name] = self

    def __getattr__(self, name: str) -> Any:
        """The layout; loads the library if necessary."""
        if name not in ("pack", "size", "offsets"):
            raise AttributeError(name)
        if reason := why_missing():
            raise RuntimeError(reason)
        return self.__dict__[name]

    def read(self, size: int, fields: Sequence[Field]) -> str:
        """Read the layout from the library; return an error message, or an empty string."""
        names = [field.name if field.length == 1 else f"{field.name}[{field.length}]" for field in fields]
        if names != self.fields:
            return f"{self.name} has the fields {', '.join(names)}, but {', '.join(self.fields)} are packed"
        self.offsets, self.format = {}, ""
        for field in fields:
            nested = self.known.get(field.type)
            self.format += f"{field.length}{field.type}" if nested is None else nested.format * field.length
            self.offsets[field.name] = field.offset
            if struct.calcsize("@" + self.format) != field.offset + field.size:
                return f"the field {field.name} of {self.name} is not where Python's struct module puts it"
        layout = struct.Struct("@" + self.format)
        self.pack, self.size = layout.pack, layout.size
        return "" if layout.size == size else f"{self.name} has {size} bytes, but {layout.size} are packed"


class Field(NamedTuple):
    """A field of a structure, as described by the library."""

    name: str
    type: str
    length: int
    offset: int
    size: int


# Nested structures come first.
TENSOR = Structure("tensor", "data stride[4] present")
Structure("intervals", "start stop stride[3]")
Structure("tiles", "pointer start stop bits_index bits stride[2]")
PROBLEM = Structure(
    "dot",
    "B H G Q K D E dtype threads mask has_sink scale softcap temperature q k v intervals tiles diagonal row_table bias "
    "bias_dtype wants_value_table radius offset sink seed dropout_threshold kv_dtype dropout_scale weight "
    "k_scale v_scale normalization reserved normalization_bias",
)
RESULT = Structure("dot_result", "out lse out_table max_logit")
GRADIENT = Structure(
    "dot_gradient",
    "out lse out_table d_out d_lse d_out_table d_q d_k d_v d_diagonal d_row_table d_bias delta d_weight",
)
TANGENT = Structure(
    "dot_tangent", "d_q d_k d_v d_diagonal d_row_table d_bias d_out d_lse d_out_table d_sink has_d_sink"
)
STATISTICS = Structure(
    "dot_statistics",
    "lse entropy max_logit distance top top_keys top_weights mass chosen_start chosen_stop chosen_count",
)
COLUMNS = Structure("dot_columns", "out columns count")
POOL = Structure("dot_pool", "out rows columns")
LINEAR = Structure("linear", "B H G N M E dtype threads map reserved q k v")
LINEAR_RESULT = Structure("linear_result", "out norm")
LINEAR_GRADIENT = Structure("linear_gradient", "out norm d_out d_q d_k d_v")
RECURRENCE = Structure(
    "recurrence", "B H N M E q_heads k_heads v_heads dtype threads per_channel reserved q k v decay beta state"
)
RECURRENCE_RESULT = Structure("recurrence_result", "out state checkpoints")
RECURRENCE_GRADIENT = Structure("recurrence_gradient", "checkpoints d_out d_final d_q d_k d_v d_decay d_beta d_state")
PACKED_LINEAR = Structure(
    "packed_linear",
    "M N K x_row residual_row out_row x packed bias residual out factor format activation threads has_bias "
    "has_residual reserved",
)
Structure("weight", "N K packed bias factor format has_bias")
BLOCK = Structure("block", "qkv output up down gain[2] shift[2] attention")
STACK = Structure(
    "stack",
    "B N d_model H G D d_hidden layers attentions blocks attention keys values x y normed qkv attended hidden cos sin "
    "d_rotary table_batch eps interleaved cached post_norm rms_norm gated activation threads reserved",
)
ABSENT = (0, 0, 0, 0, 0, 0)
ADDRESS = struct.Struct("@P").pack
_LARGE_PAGE_BYTES = 1 << 22  # contains at least one whole large page


def _read_layout(text: str) -> str:
    """Read the layout of all structures from the library; return an error message, or an empty string."""
    sizes: dict[str, int] = {}
    fields: dict[str, list[Field]] = {}
    numbers: dict[str, int] = {}
    for line in text.splitlines():
        kind, name, *rest = line.split()
        if kind == "structure":
            structure, sizes[name], fields[name] = name, int(rest[0]), []
        elif kind == "field":
            fields[structure].append(Field(name, rest[0], *map(int, rest[1:])))
        else:
            numbers[name.removeprefix("REGARD_")] = int(rest[0])
    for name, known in Structure.known.items():
        if name not in sizes:
            return f"{name} is missing"
        if reason := known.read(sizes[name], fields[name]):
            return reason
    wrong = {name: value for name, value in _NUMBERS.items() if numbers.get(name) != value}
    return "".join(f"{name} is {numbers.get(name)}, but {value} is needed" for name, value in list(wrong.items())[:1])


@cache
def library() -> ctypes.CDLL | str:
    """Load the compiled library, or return the reason why it is missing. `REGARD_LIBRARY` overrides its path."""
    named = os.environ.get("REGARD_LIBRARY")
    folders = [Path(__file__).parents[2], *(Path(entry) / "regard" for entry in sys.path if entry)]
    files = [Path(named)] if named else [file for folder in folders for file in sorted(folder.glob("_native.*"))]
    files = [file for file in files if file.suffix in (".so", ".dylib", ".dll", ".pyd")]
    if not files:
        return "the compiled library is missing: no C++ compiler was found when regard was installed"
    try:
        lib = ctypes.CDLL(str(files[0]))
        version = lib.regard_interface()
    except (OSError, AttributeError) as error:
        return f"the compiled library does not load: {error}"
    if version != INTERFACE:
        return f"the compiled library has interface {version}, but {INTERFACE} is needed; reinstall regard"
    for name in ("regard_isa", "regard_isas_compiled", "regard_version", "regard_layout"):
        getattr(lib, name).restype = ctypes.c_char_p
    if reason := _read_layout(lib.regard_layout().decode()):
        return f"the compiled library has another layout of structures: {reason}; reinstall regard"
    names = (
        "dot_forward",
        "dot_backward",
        "dot_row_statistics",
        "dot_weights",
        "dot_map",
        "linear_forward",
        "linear_backward",
        "recurrence_forward",
        "recurrence_backward",
    )
    for name in (f"regard_{name}" for name in names):
        getattr(lib, name).argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    lib.regard_dot_jvp.argtypes = [ctypes.c_char_p] * 3
    long, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.regard_packed_bytes.restype, lib.regard_packed_bytes.argtypes = long, [long, long, ctypes.c_int32]
    lib.regard_multiply.argtypes = lib.regard_run_stack.argtypes = [ctypes.c_char_p]
    lib.regard_prefer_large_pages.restype, lib.regard_prefer_large_pages.argtypes = None, [pointer, long]
    return lib


def why_missing() -> str:
    """Return the reason why the library is missing, or an empty string."""
    lib = library()
    return lib if isinstance(lib, str) else ""


def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 numbers are those of the CPU: weights are then rounded to bfloat16."""
    lib = library()
    return not isinstance(lib, str) and lib.regard_isa().decode() in BFLOAT16_PRODUCTS


def rounds_inputs() -> bool:
    """Whether inputs of products with int8 and int4 weights are rounded to 8 bits, for the CPU's integer products."""
    lib = library()
    return not isinstance(lib, str) and lib.regard_isa().decode() in INTEGER_PRODUCTS


def build_info() -> dict[str, str]:
    """Return the details of the library for bug reports."""
    lib = library()
    if isinstance(lib, str):
        return {"native": lib}
    return {
        "native": lib._name,
        "instruction set": lib.regard_isa().decode(),
        "bfloat16": "multiplied by the CPU's own instructions" if multiplies_bfloat16() else "multiplied as float32",
        "int8, int4": (
            "multiplied as integers, with inputs rounded to 8 bits" if rounds_inputs() else "multiplied as float32"
        ),
        "compiled for": lib.regard_isas_compiled().decode(),
        "threads": str(torch.get_num_threads()) if lib.regard_has_threads() else "1 (built without OpenMP)",
    }


def call(name: str, *arguments: bytes | int) -> None:
    if status := getattr(library(), name)(*arguments):
        raise status_error(status, arguments[0])


def status_error(status: int, given: bytes | int = b"") -> Exception:
    kind, message = _ERRORS.get(status, (RuntimeError, f"the native engine failed with status {status}"))
    if isinstance(given, bytes) and len(given) == PROBLEM.size:
        sizes = zip("BHGQKDE", struct.unpack_from("@7q", given), strict=True)
        message += f": {', '.join(f'{axis}={n}' for axis, n in sizes)}, {torch.get_num_threads()} threads"
    return kind(message)


def prefer_large_pages(tensor: Tensor) -> Tensor:
    """Put a tensor that is about to be written on large pages, since faulting in small ones may cost more."""
    lib = library()
    if tensor.nbytes >= _LARGE_PAGE_BYTES and not isinstance(lib, str):
        lib.regard_prefer_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def tensor_fields(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the values of a `regard_tensor`: address, strides (0 along an axis of size 1) and presence."""
    if tensor is None:
        return ABSENT
    strides = [0 if n == 1 else step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return data_address(tensor), *strides, *(0,) * (4 - len(strides)), 1


def row_fields(tensor: Tensor | None) -> tuple[int, ...]:
    """Like `tensor_fields`, for contiguous rows."""
    return ABSENT if tensor is None else (*tensor_fields(tensor)[:4], 1, 1)


def release_free_memory() -> None:
    """Return freed memory to the system: the C library keeps blocks of the size of a weight."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
