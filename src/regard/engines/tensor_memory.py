"""Which tensors the compiled kernels may read in place.

A kernel is given addresses. An address describes the whole tensor only if it is plain: of type `Tensor` or `Parameter`,
strided, materialised, without a pending negation, and with nothing in torch that must see the call. Negations
(`c.conj().imag`) and zeros without storage are materialised first. Every other call goes through the registered
operator, which torch's dispatcher passes to subclasses (`__torch_dispatch__`) and modes (fake tensors, `make_fx`, FLOP
counters, selective checkpointing), and records in graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_TYPES = (Tensor, nn.Parameter)
SMALLEST_ADDRESS = 1 << 40  # smaller addresses are checked more closely


def is_direct(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the kernels may read the memory of these CPU tensors, bypassing torch's dispatcher.

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
    """Raised when a tensor that a kernel should read or write has no memory."""


def materialize(tensor: Tensor) -> Tensor:
    """Materialise a pending negation or zeros without storage."""
    if type(tensor) not in _TYPES:
        return tensor
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def data_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if it has none (the pointer of a view is then its offset)."""
    address = tensor.data_ptr()
    if address < SMALLEST_ADDRESS and address == tensor.storage_offset() * tensor.element_size():
        return 0
    return address


def is_sharded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the tensors are DTensors; raises if only some are."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    distributed = [isinstance(tensor, module.DTensor) for tensor in tensors if tensor is not None]
    if any(distributed) and not all(distributed):
        raise TypeError(
            "query, key, value and the tensors of the description must all be DTensors, or none; "
            "pass the local shards, .to_local(), or the whole tensors, .full_tensor()"
        )
    return any(distributed)
