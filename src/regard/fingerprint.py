"""Fingerprints of tensors and of the values that functions read: equal fingerprints mean equal content.

A version counter does not detect every change: writes through `.data`, numpy, DLPack or `torch.distributed` do not
count. So the content itself is read, which is cheap compared with attention over it: about 0.1 ms for a million bools.
"""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

TENSOR = object()  # marks the fingerprint of a tensor in a state
MAX_INLINE = 32  # up to this many numbers are their own fingerprint
CONSTANT_MODULES = {"torch", "numpy", "math", "operator", "functools", "itertools", "builtins", "regard"}
OPEN_BUILTINS = {"__import__", "eval", "exec", "getattr", "globals", "locals", "next", "open", "vars"}
VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class _UnknownContent(Exception):
    """Raised for values whose content cannot be fingerprinted."""


def readable(tensor: Tensor) -> bool:
    """Whether the values can be read: not those of traced or wrapped tensors, nor of tensors without memory."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func's derivatives; in a graph, the tensor itself."""
    if torch.compiler.is_compiling():
        return tensor
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def without_transforms() -> AbstractContextManager:
    """Suspend torch.func transforms and modes, with new tensors on the CPU."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if not transformed and not modes:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.device("cpu"))
    if transformed:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def fingerprint(value: Tensor) -> Hashable | None:
    """Return a value that is equal only for tensors of equal dtype, shape and content; None if they cannot be read.

    Equal tensors have equal fingerprints, except that an expanded axis differs from a materialised one.

    >>> a = torch.tensor([True, False])
    >>> before = fingerprint(a)
    >>> a.data[1] = True
    >>> fingerprint(a) == before, fingerprint(torch.tensor([True, False])) == before
    (False, True)
    """
    value = unwrap(value)
    if not readable(value):
        return None
    with without_transforms():
        if value.numel() <= MAX_INLINE and not value.is_floating_point() and not value.is_complex():
            return value.dtype, tuple(value.shape), tuple(value.flatten().tolist())
        repeated = tuple([step == 0 and n > 1 for step, n in zip(value.stride(), value.shape, strict=True)])
        once = value.detach()[tuple([slice(0, 1) if again else slice(None) for again in repeated])]
        array = once.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        array = np.packbits(array) if value.dtype == torch.bool else array
        return value.dtype, tuple(value.shape), repeated, _digest(array)


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.data, digest_size=16).digest()


def function_state(function: Any) -> Hashable | None:
    """Return a value that changes with the function and everything that it reads; None if unknown.

    Covers closures, defaults, attributes, globals and `functools.partial`, as far as they are numbers, strings,
    tensors, arrays, containers of these, and functions. An object of another class may read anything, and is unknown.

    >>> limit = torch.tensor(3)
    >>> rule = lambda b, h, p, j: j < limit
    >>> before = function_state(rule)
    >>> limit.data.fill_(4)
    tensor(4)
    >>> function_state(rule) == before
    False
    """
    try:
        return _state(function, ())
    except _UnknownContent:
        return None


def reads_tensors(function: Any) -> bool:
    """Whether a function reads tensors or arrays other than its arguments, as far as is known."""

    def contains_tensor(state: Any) -> bool:
        return state is TENSOR or (isinstance(state, tuple) and any(map(contains_tensor, state)))

    return (state := function_state(function)) is None or contains_tensor(state)


def accelerator_of(function: Any) -> torch.device | None:
    """Return the device of the tensors that a function reads, other than its arguments, unless it is the CPU."""
    while type(function) is partial:
        for value in (*function.args, *function.keywords.values()):
            if isinstance(value, Tensor) and not value.is_cpu:
                return value.device
        function = function.func
    if not isinstance(function, types.FunctionType):
        return None
    values = [*(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))]
    values += [function.__globals__.get(name) for name in _names(function.__code__)]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return next((value.device for value in values if isinstance(value, Tensor) and not value.is_cpu), None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _state(value: Any, inside: tuple[int, ...]) -> Hashable:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _UnknownContent
        return TENSOR, value.dtype.str, value.shape, _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    if isinstance(value, Tensor):
        if (content := fingerprint(value)) is None:
            raise _UnknownContent
        return TENSOR, content
    if type(value) in VALUES:
        return type(value), value
    if isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in CONSTANT_MODULES:
            raise _UnknownContent
        return "module", value.__name__
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | type(None)):
        return "builtin", value.__module__, value.__qualname__
    if isinstance(value, type) and value.__module__.split(".")[0] in CONSTANT_MODULES:
        return "class", value.__module__, value.__qualname__
    if id(value) in inside:
        return "again", inside.index(id(value))
    inside = (*inside, id(value))
    if isinstance(value, types.FunctionType):
        return "function", value.__code__, tuple((name, _state(part, inside)) for name, part in _captured_values(value))
    if type(value) is partial:
        return "partial", *(_state(part, inside) for part in (value.func, value.args, value.keywords))
    if type(value) in (tuple, list):
        return type(value), *(_state(part, inside) for part in value)
    if type(value) is dict:
        return dict, *((_state(name, inside), _state(part, inside)) for name, part in value.items())
    raise _UnknownContent


def _captured_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Iterate over the values other than its arguments that a function reads, with their names."""
    yield "defaults", function.__defaults__
    yield "keyword defaults", function.__kwdefaults__
    yield "attributes", function.__dict__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            raise _UnknownContent from None
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
        elif name in OPEN_BUILTINS:
            raise _UnknownContent


@lru_cache(maxsize=256)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that code may look up, globals and attributes alike; for code that imports, only these."""
    if any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(code)):
        return ("__import__",)
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return tuple(sorted(names))
