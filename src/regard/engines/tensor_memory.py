"""Which tensors the compiled kernels may read in place.

A kernel is given addresses. An address is the whole tensor only if the tensor is plain: of the type `Tensor` or
`Parameter`, strided, materialised, with no pending negation, and with nothing in torch that must see the call.
Negations (`c.conj().imag`) and zeros without storage are written out first. Every other call goes through the
registered operator, which torch's dispatcher hands to subclasses (`__torch_dispatch__`) and modes (fake tensors,
`make_fx`, FLOP counters, selective checkpointing), and records in graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_TYPES = (Tensor, nn.Parameter)
SMALLEST_ADDRESS = 1 << 40  # addresses below it are checked more closely


def is_direct(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the kernels may be called with the memory of these CPU tensors, without torch's dispatcher.

    >>> import torch
    >>> from regard.engines.tensor_memory import is_direct
    >>> is_direct([torch.ones(2)]), is_direct([torch.ones(2, dtype=torch.complex64).conj().imag])
    (True, False)
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _TYPES or tensor.is_neg() or tensor._is_zerotensor()):
            return False
    return True


class NoMemory(ValueError):
    """A tensor that a kernel was to read or write has no memory."""


def materialize(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own, where they are a pending negation or zeros without storage."""
    if type(tensor) not in _TYPES:
        return tensor
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def data_address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins, 0 where it has none; also of views, which add their offset to nothing."""
    found = tensor.data_ptr()
    if found < SMALLEST_ADDRESS and found == tensor.storage_offset() * tensor.element_size():
        return 0
    return found


def is_sharded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether they are DTensors, all or none."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    found = [isinstance(tensor, module.DTensor) for tensor in tensors if tensor is not None]
    if any(found) and not all(found):
        raise TypeError(
            "query, key, value and the tensors of the description must all be DTensors, or none; "
            "pass the part of this process, .to_local(), or the whole, .full_tensor()"
        )
    return any(found)
