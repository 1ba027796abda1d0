"""Short stand-ins for what tensors hold, and for what functions read: equal stand-ins, equal content.

A version counter is not enough to see a change: writes through `.data`, numpy, DLPack or `torch.distributed` do not
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

TENSOR = object()  # what stands before the fingerprint of a tensor in a state
MAX_INLINE = 32  # numbers that are their own fingerprint
CONSTANT_MODULES = {"torch", "numpy", "math", "operator", "functools", "itertools", "builtins", "regard"}
OPEN_BUILTINS = {"__import__", "eval", "exec", "getattr", "globals", "locals", "next", "open", "vars"}
VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


class _UnknownContent(Exception):
    """Something whose content cannot be told."""


def readable(tensor: Tensor) -> bool:
    """Whether the values are there to be read: not those of tensors that trace, wrap others or have no memory."""
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor that a derivative of torch.func wraps; itself where none does."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def without_transforms() -> AbstractContextManager:
    """Within, tensors are data: no torch.func transform and no mode is running, and new ones are on the CPU."""
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
    """A value that is equal only for tensors of equal dtype, shape and content; None where content cannot be read.

    It is equal for all such tensors, too, except that an expanded axis counts as different from one that is laid out.

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
    """A value that changes when the function, or a tensor, number or function that it reads, does; None if unknown.

    Known are closures, defaults, attributes, globals and `functools.partial`, as far as they are numbers, strings,
    tensors, arrays, containers of these, and functions. An object of a class may read anything, and is unknown.

    >>> limit = torch.tensor(3)
    >>> rule = lambda b, h, p, j: j < limit
    >>> before = state_of(rule)
    >>> limit.data.fill_(4)
    tensor(4)
    >>> state_of(rule) == before
    False
    """
    try:
        return _state(function, ())
    except _UnknownContent:
        return None


def reads_tensors(function: Any) -> bool:
    """Whether a function reads tensors or arrays beside its arguments, as far as one can tell."""

    def among(state: Any) -> bool:
        return state is TENSOR or (isinstance(state, tuple) and any(map(among, state)))

    return (state := function_state(function)) is None or among(state)


def _state(value: Any, inside: tuple[int, ...]) -> Hashable:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _UnknownContent
        return TENSOR, value.dtype.str, value.shape, _digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    if isinstance(value, Tensor):
        if (found := fingerprint(value)) is None:
            raise _UnknownContent
        return TENSOR, found
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
    """What a function reads beside its arguments, by name."""
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
    """The names that code may look up, globals and attributes alike; of code that imports, no more than that."""
    if any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(code)):
        return ("__import__",)
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return tuple(sorted(names))
