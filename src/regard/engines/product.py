"""x Wᵀ + b for models that only compute: by a weight that the kernels have laid out once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.engines import native


class _Laid(NamedTuple):
    """A weight as it was when it was laid out."""

    address: int
    version: int
    numbers: Tensor


_LAID = WeakTensorKeyDictionary()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: tuple[int, int] | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`, (..., K) to (..., N); `rows = (first, last)` takes only these of weight and bias.

    Where no gradient is wanted, a float32 weight on a CPU is laid out for the kernels at its first use, and again
    after it was changed. It is then held twice, and small batches take half the time.

    >>> import torch
    >>> from regard.engines.product import product
    >>> x, weight = torch.randn(3, 8), torch.randn(5, 8)
    >>> product(x, weight, rows=(0, 2)).shape
    torch.Size([3, 2])
    """
    first, last = rows or (0, weight.shape[0])
    laid = _laid_out(x, weight, bias)
    if laid is None or first % native.panel_rows():
        if rows is not None:
            weight, bias = weight[first:last], None if bias is None else bias[first:last]
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty((*x.shape[:-1], last - first), dtype=x.dtype)
    if not native.multiply(flat, weight, laid, bias, out, first):
        _LAID.pop(weight)  # it was changed through `.data`, which counts no versions
        return product(x, weight, bias, rows=rows)
    return out


def _laid_out(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The weight as the kernels read it, or nothing where torch is to compute."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or type(weight) not in (nn.Parameter, Tensor):
        return None
    wants_grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    plain = x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu and weight.dim() == 2
    if (
        wants_grad
        or not plain
        or weight.stride(1) != 1
        or x.shape[-1:] != weight.shape[1:]
        or (bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous() and bias.is_cpu))
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or weight.is_inference()  # such a tensor does not say when it is changed
        or native.missing()
    ):
        return None
    address, version = weight.data_ptr(), weight._version
    known = _LAID.get(weight)
    if known is None or known.address != address or known.version != version:
        known = _LAID[weight] = _Laid(address, version, native.lay_out(weight))
    return known.numbers
