"""A tensor subclass that carries the description of a mask, and is materialised only if its values are read.

Most models pass masks to their attention without reading them, so a description is enough. Some slice, convert or add
them to scores. A `MaskTensor` serves both: for torch it is the (B, 1, Q, K) tensor of 0 and the minimum of its dtype
that models expect, materialised at the first computation; for regard's attention it is the description. A view of the
tensor may be written to: once there is one, the attention reads the tensor and ignores the description.
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
    """The materialised tensor, and whether there may be a view of it."""

    tensor: Tensor | None = None
    exposed: bool = False


class MaskTensor(Tensor):
    """An additive mask (B, 1, Q, K) that is materialised at the first computation.

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
    _dense_state: _DenseState  # shared by all aliases

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, pattern: Pattern, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> MaskTensor:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.pattern, self._dense_state = pattern, _DenseState()
        return self

    @property
    def intact(self) -> bool:
        """Whether the description is still valid: no view of the tensor exists that could have been written to."""
        return not self._dense_state.exposed

    @property
    def dense(self) -> Tensor:
        """The materialised tensor."""
        if self._dense_state.tensor is None:
            self._dense_state.tensor = additive_mask(self.pattern, tuple(self.shape), self.dtype, self.device)
        return self._dense_state.tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        is_alias = func in (_aten.detach.default, _aten.alias.default)
        if is_alias or (func is _aten.slice.Tensor and _is_full_slice(*args)):
            return _alias(args[0])
        aliases = any(result.alias_info is not None for result in func._schema.returns)

        def materialize(mask: MaskTensor) -> Tensor:
            mask._dense_state.exposed |= aliases  # written to now, or later through a view
            return mask.dense

        args, kwargs = tree_map_only(MaskTensor, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> MaskTensor | Tensor:
        if self.intact:
            return MaskTensor(self.pattern, tuple(self.shape), self.dtype, self.device)
        return self.dense.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        content = repr(self.pattern.mask) if self.intact else "materialised, possibly modified"
        return f"MaskTensor({content}, shape={tuple(self.shape)})"

    # The protocol of torch.compile for wrapper subclasses: inside a graph, the mask is materialised.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self._dense_state.exposed = True
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Tensor:
        return inner["dense"]


def additive_mask(pattern: Pattern, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask (B, 1, Q, K): 0 for visible entries, the minimum of the dtype for hidden ones."""
    B, H, Q, K = shape
    if pattern.mask is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    offset = K - Q if pattern.offset is None else pattern.offset
    allowed = pattern.mask.allows(Frame(B, H, Q, K, offset).indices(device=device)).expand(shape)
    return torch.zeros(shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _alias(mask: MaskTensor) -> MaskTensor:
    alias = MaskTensor(mask.pattern, tuple(mask.shape), mask.dtype, mask.device)
    alias._dense_state = mask._dense_state
    return alias


def _is_full_slice(
    mask: Tensor, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> bool:
    """Whether a slice keeps the whole axis, as `mask[..., :keys]` often does."""
    size = mask.shape[axis]
    return (start or 0) in (0, -size) and (stop is None or stop >= size) and step == 1
