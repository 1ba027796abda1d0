"""A device without hardware: it computes on the CPU and refuses what a GPU refuses.

Tensors of different devices do not mix, except numbers (CPU tensors without axes) and CPU indices; memory is not shared
with numpy; a generator belongs to one device. Every transfer has to be written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

TYPE = "strict"
_aten = torch.ops.aten
_TRANSFERS = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor}
_ALIASES = {_aten.detach.default, _aten.alias.default}


class StrictTensor(Tensor):
    """A tensor of the device; `raw` has its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> StrictTensor:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(TYPE, 0),
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy; use .cpu() first")
        return self.raw.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class StrictMode(TorchDispatchMode):
    """Also sees calls that create tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class MixedDevices(RuntimeError):
    """Raised where a GPU would refuse a call."""


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the CPU; the result is on the device that it would have on a GPU."""
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    ours = any(isinstance(each, StrictTensor) for each in tensors)
    target = kwargs.get("device")
    on_device = ours if target is None else torch.device(target).type == TYPE
    if func in _TRANSFERS:
        on_device = isinstance(args[0], StrictTensor) if func is _aten.copy_.default else on_device
    elif ours:
        free = tree_flatten(args[1])[0] if func in _INDEXED else []
        for each in tensors:
            if not isinstance(each, StrictTensor) and each.dim() and not any(each is one for one in free):
                raise MixedDevices(f"{func} has tensors of {TYPE} and of the CPU, one of shape {tuple(each.shape)}")
    generator = kwargs.get("generator")
    if on_device and generator is not None and generator.device.type != TYPE:
        raise MixedDevices(f"{func} on {TYPE} has a generator of {generator.device}")
    given = dict(kwargs)
    if target is not None:
        given["device"] = torch.device("cpu")
    out = func(*tree_map(_inside, args), **tree_map(_inside, given))
    if not on_device:
        return out
    if func._schema.is_mutable and func is not _aten.set_.source_Tensor:
        written = [args[n] if n < len(args) else kwargs[each.name] for n, each in enumerate(func._schema.arguments)
                   if each.alias_info is not None and each.alias_info.is_write]  # fmt: skip
        if len(written) == 1 and isinstance(out, Tensor):
            return written[0]
        if out is None:
            return None
    return tree_map(_outside, out)


def _inside(value: Any) -> Any:
    return value.raw if isinstance(value, StrictTensor) else value


def _outside(value: Any) -> Any:
    return StrictTensor(value) if isinstance(value, Tensor) and not isinstance(value, StrictTensor) else value


class _Module:
    """What torch.cuda is to a GPU."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass  # numbers are drawn from the generator of the CPU

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_LIBRARY: list[Any] = []  # kept, since registrations end with it


@cache
def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(TYPE, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **options: Any) -> Tensor:
        return StrictTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> Tensor:
        return StrictTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _inside(target).copy_(_inside(source))
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")  # where modes are suspended
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    _LIBRARY.append(library)


def _enter_no_grad(self: Any) -> None:
    self.no_grad = torch.no_grad()
    self.no_grad.__enter__()


@contextmanager
def strict_device() -> Iterator[torch.device]:
    """Register the device, and compute what is created on it within the context."""
    _register()
    with StrictMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.inference_mode, "__enter__", _enter_no_grad)  # views of tensors made outside of it
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: self.no_grad.__exit__(*error))
        yield torch.device(TYPE, 0)
