"""What holds for all layers of one call, worked out once: masks, biases, tables of positions."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from regard.attention import Attention
from regard.masks import Mask, dense, padding
from regard.nn.rotary import Rotary, Table
from regard.positions import Bias
from regard.positions.biases import dense_bias
from regard.sharding import sharding


class Shared:
    """Mask, bias and positions of one call. A stack makes one and hands it to every layer.

    mask: who may look at whom, beside what a layer's own description says.
    bias: added to the scores of every layer, beside a layer's own (T5's is one for all layers).
    positions: where the queries stand, (N,) or (B, N) whole numbers, for rotary parts; none is 0 ... N - 1.
    filler: how many tokens at the front of each batch row are filler, (B,): prompts of different lengths, cached.
    query_position, key_position: added to what queries and keys are projected from, but not values (DETR).

    Where sequences are shared with other processes, mask and bias are those of the whole sequence; `own` takes this
    process's part of the rest, and `parted` says that this was done.
    """

    def __init__(
        self,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        *,
        filler: Tensor | None = None,
        query_position: Tensor | None = None,
        key_position: Tensor | None = None,
    ) -> None:
        self.mask = dense(mask) if isinstance(mask, Tensor) else mask
        self.bias = dense_bias(bias) if isinstance(bias, Tensor) else bias
        self.positions = positions
        self.filler = filler
        self.query_position, self.key_position = query_position, key_position
        self.parted = False
        self._made: dict[tuple[Attention, int], Attention] = {}
        self._tables: dict[tuple[Rotary, int], Table] = {}

    def attend(self, own: Attention, dropped: int = 0) -> Attention:
        """A layer's own description and what this call adds; layers that share theirs share this one, and its plans."""
        if self.mask is None and self.bias is None and self.filler is None:
            return own
        known = self._made.get((own, dropped))
        if known is None:
            mask, bias = own.mask, own.bias
            if self.mask is not None:
                mask = self.mask if mask is None else mask & self.mask
            if self.filler is not None and bool((left := (self.filler - dropped).clamp(min=0)).any()):
                mask = ~padding(left) if mask is None else mask & ~padding(left)
            if self.bias is not None:
                bias = self.bias if bias is None else bias + self.bias
            known = self._made[own, dropped] = own.replace(mask=mask, bias=bias)
        return known

    def biased(self, bias: Bias) -> Shared:
        """The same with a bias more."""
        other = copy(self)
        other.bias, other._made = bias if self.bias is None else self.bias + bias, {}
        return other

    def moved(self, positions: Tensor) -> Shared:
        """The same at other positions, as in the next step of generation: descriptions that were made are kept."""
        other = copy(self)
        other.positions, other._tables = positions, {}
        return other

    def own(self) -> Shared:
        """The same for the tokens of this process, where sequences are shared with others."""
        together = sharding()
        if together is None or self.parted:
            return self
        other = copy(self)
        other.parted, other._tables = True, {}
        for name, dim in (("positions", -1), ("query_position", -2), ("key_position", -2)):
            if (whole := getattr(self, name)) is not None:
                setattr(other, name, together.own(whole, dim))
        return other

    def table(self, rotary: Rotary, width: int, like: Tensor) -> Table:
        """The table of a rotary part for the tokens of `like` (B, N, ...)."""
        known = self._tables.get((rotary, width))
        if known is None:
            at, together = self.positions, sharding()
            here = None
            if together is not None and (at is None or rotary.scaling is not None):
                here = together.positions(like.shape[1], like.device)
            if at is None:
                at = torch.arange(like.shape[1], device=like.device) if here is None else here
            if here is None or together is None or rotary.scaling is None:
                known = rotary.table(at, width, like.dtype)
            else:  # a scaling looks at the whole
                cos, sin = rotary.table(together.whole(at, -1), width, like.dtype)
                known = cos.index_select(-3, here), sin.index_select(-3, here)
            self._tables[rotary, width] = known
        return known


def check_mask(mask: Tensor, shape: Sequence[int] | None = None) -> None:
    """A mask of real tokens is (B, N) bool, and as large as the tokens where their shape is known."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        came = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a (B, N) bool tensor, True for real tokens, but is {came}; try mask.bool()")
    if shape is not None and mask.shape != torch.Size(shape):
        raise ValueError(f"mask must be (B, N) = {tuple(shape)} as the tokens are, but is {tuple(mask.shape)}")


def key_mask(mask: Tensor | None, tokens: Tensor | None = None) -> Mask | None:
    """A (B, N) bool mask of real tokens as a mask of keys: the cheapest that says it. tokens: (B, N, ...), if known."""
    if mask is None:
        return None
    check_mask(mask, None if tokens is None else tokens.shape[:2])
    if torch.compiler.is_compiling():
        return dense(mask[:, None, None])
    if bool(mask.all()):
        return None
    lengths, at = mask.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if torch.equal(mask, at < lengths[:, None]):
        return padding(lengths)
    if torch.equal(mask, at >= mask.shape[1] - lengths[:, None]):
        return ~padding(mask.shape[1] - lengths)
    return dense(mask[:, None, None])
