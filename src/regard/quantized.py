"""Keys and values in fewer bytes than they are computed with: what a cache returns, and the kernels read in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

STORED = (torch.bfloat16, torch.float16, torch.int8)
LARGEST = 127  # of the integers; -128 is not used, so that a token and its negative have the same digits


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """Keys or values (B, G, K, D) stored as bfloat16 or float16, or as int8 with a scale per token and head.

    Returned by a cache with a `dtype`, and accepted by `rg.attention` as key and value. The result is that of the
    dequantized numbers; on a CPU, the native engine reads the stored ones in place.

    data: (B, G, K, D). scale: (B, G, K) float32, for int8 only. dtype: of the tensor that was quantized.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
    >>> k, v = (rg.QuantizedTensor.quantize(x, torch.int8) for x in (k, v))
    >>> k
    QuantizedTensor((1, 2, 16, 8), int8, for float32)
    >>> rg.attention(q, k, v).dtype
    torch.float32
    """

    data: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        data, scale = self.data, self.scale
        check_stored_dtype(data.dtype)
        expected = (torch.float32, data.shape[:3], data.device) if data.dtype == torch.int8 else None
        given = None if scale is None else (scale.dtype, scale.shape, scale.device)
        if data.dim() != 4 or given != expected:
            raise ValueError(
                "a QuantizedTensor has data (B, G, K, D), and for int8 only a scale (B, G, K) of float32 on the same "
                f"device, got {data.dtype} {tuple(data.shape)} and "
                + ("no scale" if scale is None else f"a scale {scale.dtype} {tuple(scale.shape)} on {scale.device}")
            )
        _check_constant(data)
        if scale is not None:
            _check_constant(scale)

    @classmethod
    def quantize(cls, tensor: Tensor, dtype: torch.dtype) -> QuantizedTensor:
        """Round a tensor (B, G, K, D) to a dtype. A token of a head that is not finite becomes NaN in int8.

        A tensor with gradients raises, because rounded numbers have none.
        """
        check_stored_dtype(dtype)
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or not tensor.is_floating_point():
            given = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ValueError(f"a tensor to quantize must be floating point and (B, G, K, D), got {given}")
        _check_constant(tensor)
        if dtype != torch.int8:
            return cls(tensor.to(dtype), None, tensor.dtype)
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        largest = wide.abs().amax(-1) if tensor.shape[3] else wide.new_zeros(tensor.shape[:3])
        scale = (largest / LARGEST).float()
        scale = torch.where(largest.isfinite() & scale.isfinite(), scale, torch.nan)
        data = (wide / scale.unsqueeze(-1)).nan_to_num(0.0, LARGEST, -LARGEST).round().clamp(-LARGEST, LARGEST)
        return cls(data.to(torch.int8), scale, tensor.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers as a tensor of the original dtype, or of `dtype`."""
        dtype = dtype or self.dtype
        if self.scale is None:
            return self.data.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (self.data.to(wide) * self.scale.to(wide).unsqueeze(-1)).to(dtype)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __repr__(self) -> str:
        stored, dtype = (str(x).removeprefix("torch.") for x in (self.data.dtype, self.dtype))
        return f"QuantizedTensor({tuple(self.shape)}, {stored}, for {dtype})"


def _check_constant(tensor: Tensor) -> None:
    """Raise if a derivative of a tensor could be requested, which rounded numbers do not have."""
    tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
    if tangent or (tensor.requires_grad and torch.is_grad_enabled()):
        raise RuntimeError(
            "keys and values in fewer bytes have no gradients or tangents: use torch.no_grad(), detach() them, or "
            "a cache without a dtype"
        )


def check_stored_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in STORED:
        raise ValueError(
            f"dtype of stored keys and values must be {', '.join(map(str, STORED))}, got {dtype!r}; without a dtype a "
            "cache stores them as they are"
        )


def is_one_batch(*tensors: Any) -> bool:
    """Whether these are (B, ..., ..., ...) with one B, on one device."""
    return len({(len(x.shape), x.shape[0], x.device) for x in tensors}) == 1 and len(tensors[0].shape) == 4


def dequantize(x: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this dtype; tensors that are not quantized as they are."""
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x
