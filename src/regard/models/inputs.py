"""Inputs of models in their three forms: padded tensors with a mask, packed batches, and lists."""

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
    """Inputs as a stack takes them. `packed` and `listed` say how results go back to the form that came."""

    values: Tensor  # (B, N, ...)
    positions: Tensor  # (N,) or (B, N)
    context: LayerContext
    mask: Tensor | None
    packed: Packed | None
    listed: bool

    def to_local(self) -> ModelInputs:
        """The tokens of this process, where sequences are shared with others; results are then (B, N, ...) of them."""
        if (sharding := current_sharding()) is None:
            return self
        values, positions = sharding.to_local(self.values, 1), sharding.to_local(self.positions, -1)
        return self._replace(values=values, positions=positions, context=self.context.to_local())

    def shard_like(self, whole: Tensor) -> Tensor:
        """What is told of every token, (B, N, ...), for the tokens that are here."""
        sharding = current_sharding()
        return sharding.to_local(whole, 1) if self.context.is_local and sharding is not None else whole

    def to_input_form(self, hidden: Tensor) -> Tensor | Packed | list[Tensor]:
        """(B, N, d_model) in the form of the inputs: as it is, packed, or a list."""
        if self.packed is None or self.context.is_local:
            return hidden
        packed = self.packed.with_values(hidden.flatten(0, 1))
        return unpack(packed) if self.listed else packed

    def pool(self, pooling: nn.Module, hidden: Tensor) -> Tensor:
        """(B, N, d_model) to one vector a sequence."""
        if self.packed is None:
            return pooling(hidden, self.mask)
        return pooling(self.packed.with_values(hidden.flatten(0, 1)))

    def local_context(self, reach: int) -> LayerContext:
        """Longformer's mask: tokens attend to `reach` tokens on each side, and to the first of their sequence."""
        starts: list[int] | list[list[int]] = [0]
        if self.mask is not None and torch.compiler.is_compiling():  # a graph cannot read where rows start
            at = torch.arange(self.mask.shape[1], device=self.mask.device)
            first = at == self.mask.int().argmax(1, keepdim=True)  # (B, N)
            visible = ((at[:, None] - at).abs() <= reach) | first[:, None] | first[:, :, None]
            return LayerContext(dense(visible[:, None] & self.mask[:, None, None]), positions=self.positions)
        if self.mask is not None:
            starts = [[first] for first in self.mask.int().argmax(1).tolist()]
        elif self.packed is not None and len(self.values) == 1:
            starts = [first for first in self.packed.cu_seqlens[:-1].tolist() if first < self.values.shape[1]]
        local: Mask = window(reach, reach) | global_tokens(starts)
        return LayerContext(local if self.context.mask is None else local & self.context.mask, positions=self.positions)


def token_positions(inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Positions of tokens (B, N, ...), counted from the first real token of each row: (N,), or (B, N) if rows differ.

    Filler before the first token is at 0, filler behind the last of a row is where that is. A hole counts, so that
    distances are those of relative positions, windows and biases, which know nothing of the mask. A row has
    the same positions in any batch, compiled or not.

    >>> import torch
    >>> from regard.models.inputs import token_positions
    >>> token_positions(torch.zeros(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool())
    tensor([[0, 0, 0, 1, 2],
            [0, 1, 2, 3, 3]])
    """
    at = torch.arange(inputs.shape[1], device=inputs.device)
    if mask is None or not mask.shape[1]:
        return at
    first = mask.int().argmax(1, keepdim=True)
    if not torch.compiler.is_compiling() and not bool(first.any()):
        return at
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1, keepdim=True)
    return (at.minimum(last) - first).clamp(min=0)


def check_right_padding(mask: Tensor, tokens: Tensor) -> None:
    """A mask (B, N) of samples or frames is True for the first of each row: models that count them take no other."""
    check_mask(mask, tokens.shape[:2])
    leading = mask[:, :1].all() & ~(mask[:, 1:] & ~mask[:, :-1]).any()
    message = "mask must be True for the first frames of each row, at least one, and False behind them"
    if torch.compiler.is_compiling():
        torch._assert_async(leading, message)
    elif not bool(leading):
        raise ValueError(message)


def prepare_inputs(inputs: Inputs, mask: Tensor | None = None, *, batched: bool | None = None) -> ModelInputs:
    """Inputs (B, N, ...) with a (B, N) mask, packed, or a list of (n, ...), which is packed.

    batched: whether packed sequences of equal lengths become a plain batch (B, N, ...). Unless specified, they do where
        sequences are not shared with other processes: there the form of the result must not depend on the lengths.
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2:
            raise ValueError(
                f"inputs must be (B, N), packed, or a list of sequences, but are {format_shape(inputs)}; try "
                "inputs[None]"
            )
        keys, positions = key_mask(mask, inputs), token_positions(inputs, mask)
        return ModelInputs(inputs, positions, LayerContext(keys, positions=positions), mask, None, False)
    if mask is not None:
        raise ValueError("mask goes with inputs (B, N); packed inputs and lists say their lengths themselves")
    packed = inputs if isinstance(inputs, Packed) else pack(inputs)
    listed = not isinstance(inputs, Packed)
    batched = current_sharding() is None if batched is None else batched
    if batched and len(set(packed.lengths)) == 1 and packed.lengths[0]:
        values = packed.values.unflatten(0, (len(packed), -1))
        positions = torch.arange(values.shape[1], device=values.device)
        return ModelInputs(values, positions, LayerContext(positions=positions), None, packed, listed)
    context = LayerContext(packed.mask, positions=packed.positions)
    return ModelInputs(packed.values[None], packed.positions, context, None, packed, listed)
