"""A mask that travels through a model as a tensor, and is laid out only if somebody reads it as one.

Models hand masks on to their attention. Most never look inside, and for them a description is enough. Some do: they
slice, convert, or add the mask to scores of their own. A `MaskTensor` serves both: to torch it is the (B, 1, Q, K)
tensor of 0 and the least number of its dtype that models expect, made when it is first computed with; to our
attention it is the description. Whoever takes a view may write into it: then the tensor is believed, and the
description forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.geometry import Frame
from regard.integrations.pattern import Pattern

_aten = torch.ops.aten


@dataclass
class _DenseState:
    """What was laid out, and whether somebody has a view of it."""

    tensor: Tensor | None = None
    exposed: bool = False


class MaskTensor(Tensor):
    """An additive mask (B, 1, Q, K) that is not laid out until it is computed with.

    >>> import regard as rg, torch
    >>> from regard.integrations.mask_tensor import MaskTensor
    >>> from regard.integrations.pattern import Pattern
    >>> mask = MaskTensor(Pattern(rg.causal(), offset=0), (1, 1, 2, 2), torch.float32, torch.device("cpu"))
    >>> mask.pattern.mask, mask.intact
    (causal(), True)
    >>> (mask + 1)[0, 0].isfinite()
    tensor([[True, True],
            [True, True]])
    >>> (mask == 0)[0, 0]
    tensor([[ True, False],
            [ True,  True]])
    """

    pattern: Pattern
    _dense_state: _DenseState  # shared by all that stand for the same memory

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, pattern: Pattern, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> MaskTensor:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.pattern, self._dense_state = pattern, _DenseState()
        return self

    @property
    def intact(self) -> bool:
        """Whether nobody can have written into it."""
        return not self._dense_state.exposed

    @property
    def dense(self) -> Tensor:
        """The tensor that models expect."""
        if self._dense_state.tensor is None:
            self._dense_state.tensor = additive_mask(self.pattern, tuple(self.shape), self.dtype, self.device)
        return self._dense_state.tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        same = func in (_aten.detach.default, _aten.alias.default)
        if same or (func is _aten.slice.Tensor and _is_full_slice(*args)):
            return _alias(args[0])
        aliases = any(result.alias_info is not None for result in func._schema.returns)

        def materialize(mask: MaskTensor) -> Tensor:
            mask._dense_state.exposed |= aliases  # written now, or later through a view
            return mask.dense

        args, kwargs = tree_map_only(MaskTensor, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> MaskTensor | Tensor:
        if self.intact:
            return MaskTensor(self.pattern, tuple(self.shape), self.dtype, self.device)
        return self.dense.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = repr(self.pattern.mask) if self.intact else "laid out, perhaps changed"
        return f"MaskTensor({shown}, shape={tuple(self.shape)})"

    # What torch.compile asks of a tensor that holds another: inside, it is laid out.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self._dense_state.exposed = True
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Tensor:
        return inner["dense"]


def additive_mask(pattern: Pattern, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where one may look, and the least number of the dtype where not: (B, 1, Q, K)."""
    B, H, Q, K = shape
    if pattern.mask is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    offset = K - Q if pattern.offset is None else pattern.offset
    allowed = pattern.mask.allows(Frame(B, H, Q, K, offset).indices(device=device)).expand(shape)
    return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _alias(mask: MaskTensor) -> MaskTensor:
    again = MaskTensor(mask.pattern, tuple(mask.shape), mask.dtype, mask.device)
    again._dense_state = mask._dense_state
    return again


def _is_full_slice(
    mask: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> bool:
    """Whether a slice keeps all, as `mask[..., :keys]` often does."""
    size = mask.shape[axis]
    return (start or 0) in (0, -size) and (stop is None or stop >= size) and step == 1
