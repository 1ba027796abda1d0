"""Model inputs in three forms: padded tensors with a mask, packed batches, and lists of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.geometry import format_shape
from regard.masks import Mask, dense, global_tokens, window
from regard.nn import LayerContext, Packed, key_mask, pack, unpack
from regard.nn.context import check_mask
from regard.sharding import current_sharding

Inputs = Tensor | Packed | Sequence[Tensor]


class ModelInputs(NamedTuple):
    """Inputs in the form that a stack takes. `packed` and `listed` record the original form."""

    values: Tensor  # (B, N, ...)
    positions: Tensor  # (N,) or (B, N)
    context: LayerContext
    mask: Tensor | None
    packed: Packed | None
    listed: bool

    def to_local(self) -> ModelInputs:
        """Return the local shard when sequences are sharded; results are then (B, N, ...) of the local tokens."""
        if (sharding := current_sharding()) is None:
            return self
        values, positions = sharding.to_local(self.values, 1), sharding.to_local(self.positions, -1)
        return self._replace(values=values, positions=positions, context=self.context.to_local())

    def shard_like(self, values: Tensor) -> Tensor:
        """Take the local shard of per-token values (B, N, ...) if these inputs are local."""
        sharding = current_sharding()
        return sharding.to_local(values, 1) if self.context.is_local and sharding is not None else values

    def to_input_form(self, hidden: Tensor) -> Tensor | Packed | list[Tensor]:
        """Convert (B, N, d_model) to the form of the inputs: a tensor, packed, or a list."""
        if self.packed is None or self.context.is_local:
            return hidden
        packed = self.packed.with_values(hidden.flatten(0, 1))
        return unpack(packed) if self.listed else packed

    def pool(self, pooling: nn.Module, hidden: Tensor) -> Tensor:
        """Pool (B, N, d_model) to one vector per sequence."""
        if self.packed is None:
            return pooling(hidden, self.mask)
        return pooling(self.packed.with_values(hidden.flatten(0, 1)))

    def local_context(self, reach: int) -> LayerContext:
        """Longformer's mask: tokens attend to `reach` tokens on each side, and to the first of their sequence."""
        starts: list[int] | list[list[int]] = [0]
        if self.mask is not None and torch.compiler.is_compiling():  # an exported graph cannot read where rows start
            indices = torch.arange(self.mask.shape[1], device=self.mask.device)
            first = indices == self.mask.int().argmax(1, keepdim=True)  # (B, N)
            visible = ((indices[:, None] - indices).abs() <= reach) | first[:, None] | first[:, :, None]
            return LayerContext(dense(visible[:, None] & self.mask[:, None, None]), positions=self.positions)
        if self.mask is not None:
            starts = [[first] for first in self.mask.int().argmax(1).tolist()]
        elif self.packed is not None and len(self.values) == 1:
            starts = [first for first in self.packed.cu_seqlens[:-1].tolist() if first < self.values.shape[1]]
        local: Mask = window(reach, reach) | global_tokens(starts)
        return LayerContext(local if self.context.mask is None else local & self.context.mask, positions=self.positions)


def token_positions(inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Positions of tokens (B, N, ...), counted from the first real token of each row: (N,), or (B, N) if rows differ.

    Padding before the first real token has position 0; padding after the last real token repeats its position. Masked
    tokens in between count, so that distances agree with relative positions, windows and biases, which ignore the
    mask. A row has the same positions in any batch, compiled or not.

    >>> import torch
    >>> from regard.models.inputs import token_positions
    >>> token_positions(torch.zeros(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool())
    tensor([[0, 0, 0, 1, 2],
            [0, 1, 2, 3, 3]])
    """
    indices = torch.arange(inputs.shape[1], device=inputs.device)
    if mask is None or not mask.shape[1]:
        return indices
    first = mask.int().argmax(1, keepdim=True)
    if not torch.compiler.is_compiling() and not bool(first.any()):
        return indices
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1, keepdim=True)
    return (indices.minimum(last) - first).clamp(min=0)


def check_right_padding(mask: Tensor, tokens: Tensor) -> None:
    """Raise unless a mask (B, N) of samples or frames is padded on the right, with at least one real entry per row."""
    check_mask(mask, tokens.shape[:2])
    leading = mask[:, :1].all() & ~(mask[:, 1:] & ~mask[:, :-1]).any()
    message = "mask must be True for the first frames of each row, at least one, and False after them"
    if torch.compiler.is_compiling():
        torch._assert_async(leading, message)
    elif not bool(leading):
        raise ValueError(message)


def prepare_inputs(inputs: Inputs, mask: Tensor | None = None, *, batched: bool | None = None) -> ModelInputs:
    """Prepare inputs (B, N, ...) with a (B, N) mask, a packed batch, or a list of (n, ...).

    batched: whether packed sequences of equal lengths become a plain batch (B, N, ...). By default they do unless
        sequences are sharded, where the form of the result must not depend on the lengths.
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2:
            raise ValueError(
                f"inputs must be (B, N), packed, or a list of sequences, got {format_shape(inputs)}; try inputs[None]"
            )
        keys, positions = key_mask(mask, inputs), token_positions(inputs, mask)
        return ModelInputs(inputs, positions, LayerContext(keys, positions=positions), mask, None, False)
    if mask is not None:
        raise ValueError("packed inputs and lists take no mask: their lengths are known; omit it")
    packed = inputs if isinstance(inputs, Packed) else pack(inputs)
    listed = not isinstance(inputs, Packed)
    batched = current_sharding() is None if batched is None else batched
    if batched and len(set(packed.lengths)) == 1 and packed.lengths[0]:
        values = packed.values.unflatten(0, (len(packed), -1))
        positions = torch.arange(values.shape[1], device=values.device)
        return ModelInputs(values, positions, LayerContext(positions=positions), None, packed, listed)
    context = LayerContext(packed.mask, positions=packed.positions)
    return ModelInputs(packed.values[None], packed.positions, context, None, packed, listed)
