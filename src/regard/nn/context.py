"""What holds for all layers of one call, worked out once: masks, biases, tables of positions."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from regard.attention import Attention
from regard.masks import Mask, dense, padding
from regard.nn.cached_attention import depends_on_distance, mask_by_distance
from regard.nn.rotary import Rotary, Table
from regard.positions import Bias, Dynamic
from regard.positions.biases import dense_bias
from regard.sharding import current_sharding


class LayerContext:
    """Mask, bias and positions of one call. A stack makes one and hands it to every layer.

    mask: who may look at whom, beside what a layer's own description says.
    bias: added to the scores of every layer, beside a layer's own (T5's is one for all layers).
    positions: of the queries, (N,) or (B, N) whole numbers, for rotary parts; none is 0 ... N - 1, after those that a
        cache has seen. In self-attention they are also the keys'; those of a source are `key_positions`, likewise.
    left_padding: how many tokens at the front of each batch row are filler, (B,): prompts of different lengths, cached.
    query_position, key_position: added to what queries and keys are projected from, but not values (DETR).

    Where sequences are shared with other processes, mask and bias are those of the whole sequence; `to_local` takes
    this
    process's part of the rest, and `is_local` says that this was done.
    """

    def __init__(
        self,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        *,
        key_positions: Tensor | None = None,
        left_padding: Tensor | None = None,
        query_position: Tensor | None = None,
        key_position: Tensor | None = None,
    ) -> None:
        self.mask = dense(mask) if isinstance(mask, Tensor) else mask
        self.bias = dense_bias(bias) if isinstance(bias, Tensor) else bias
        self.positions, self.key_positions = positions, key_positions
        self.left_padding, self._longest_left_padding = (
            left_padding,
            0 if left_padding is None else int(left_padding.max()),
        )
        self.query_position, self.key_position = query_position, key_position
        self.is_local = False
        self._combined: dict[tuple[Attention, bool, bool], Attention] = {}
        self._tables: dict[tuple, Table] = {}

    def combine(self, own: Attention, *, cached: bool = False, dropped: int = 0) -> Attention:
        """A layer's own description and what this call adds; layers that share theirs share this one, and its plans.

        cached: whether the queries follow the tokens of a cache, which dropped so many of the first.
        """
        left_padding = self.left_padding if self._longest_left_padding > dropped else None
        moves = cached and isinstance(own.offset, int) and own.offset == 0  # which is the default without a cache
        if self.mask is None and self.bias is None and left_padding is None and not moves:
            return own
        known = self._combined.get((own, moves, left_padding is None))
        if known is None:
            mask, bias = own.mask, own.bias
            if self.mask is not None:
                mask = self.mask if mask is None else mask & self.mask
            if left_padding is not None:
                if not depends_on_distance(own):
                    raise ValueError(
                        f"{own!r} counts positions from the first key, which is filler in some rows of the batch; "
                        "generate from prompts of one length at a time"
                    )
                mask = ~padding(left_padding) if mask is None else mask & ~padding(left_padding)
            if self.bias is not None:
                bias = self.bias if bias is None else bias + self.bias
            known = own.replace(mask=mask, bias=bias, offset=None if moves else own.offset)
            self._combined[own, moves, left_padding is None] = known
        return known

    def with_bias(self, bias: Bias) -> LayerContext:
        """The same with a bias more."""
        other = copy(self)
        other.bias, other._combined = bias if self.bias is None else self.bias + bias, {}
        return other

    def with_positions(self, positions: Tensor) -> LayerContext:
        """The same at other positions, as in the next step of generation: descriptions that were made are kept."""
        other = copy(self)
        other.positions, other._tables = positions, {}
        return other

    def to_local(self) -> LayerContext:
        """The same for the tokens of this process, where sequences are shared with others."""
        sharding = current_sharding()
        if sharding is None or self.is_local:
            return self
        other = copy(self)
        other.is_local, other._tables = True, {}
        for name, dim in (("positions", -1), ("key_positions", -1), ("query_position", -2), ("key_position", -2)):
            if (whole := getattr(self, name)) is not None:
                setattr(other, name, sharding.to_local(whole, dim))
        return other

    def table(self, rotary: Rotary, d_head: int, like: Tensor, *, start: int = 0, of_source: bool = False) -> Table:
        """The table of a rotary part for the tokens of `like` (B, N, ...), by default at `start` ... start + N - 1.

        of_source: whether they are the keys of cross-attention.
        """
        # A length that is a symbol must not become a key: tracing would fix it.
        key = rotary, d_head, 0 if torch.compiler.is_compiling() else like.shape[1], start, of_source
        known = self._tables.get(key)
        if known is None:
            at, sharding = self.key_positions if of_source else self.positions, current_sharding()
            here = None
            if sharding is not None and (at is None or rotary.scaling is not None):
                here = sharding.positions(like.shape[1], like.device)
            if at is None:
                at = torch.arange(start, start + like.shape[1], device=like.device) if here is None else here
            elif at.shape[-1:] != like.shape[1:2] or at.shape[:-1] not in ((), (1,), like.shape[:1]):
                raise ValueError(
                    f"positions must be (N,) or (B, N) for {tuple(like.shape[:2])} tokens, but are {tuple(at.shape)}"
                )
            if sharding is not None and rotary.scaling is not None:  # which depends on the whole sequence
                at = sharding.full_tensor(at, -1)
            if isinstance(rotary.scaling, Dynamic):
                self._check_dynamic(rotary.scaling, at, start)
            known = rotary.table(at, d_head, like.dtype)
            if here is not None and rotary.scaling is not None:
                known = known[0].index_select(-3, here), known[1].index_select(-3, here)
            self._tables[key] = known
        return known

    def _check_dynamic(self, scaling: Dynamic, at: Tensor, start: int) -> None:
        """Raise where the length of a sequence, which the scaling depends on, is not that of its positions."""
        if torch.compiler.is_compiling() or not at.numel() or int(at.max()) < scaling.original:
            return
        if start:
            raise ValueError(
                f"{scaling!r} turns every key by the length of the whole sequence beyond {scaling.original} tokens, "
                "but a cache holds keys of a shorter one; compute the whole sequence without a cache, or use Yarn, "
                "Linear or Llama3 scaling"
            )
        if at.dim() == 1 and (not mask_by_distance(self.mask) or bool((at.diff() < 1).any())):
            raise ValueError(
                f"{scaling!r} depends on the length of each sequence beyond {scaling.original} tokens, which one row "
                "of positions for padded or packed sequences does not tell; pad on the left, or give positions (B, N) "
                "that repeat the last position of a row where it is padded"
            )


def check_not_in_context(**given: object) -> None:
    """Raise if a call gives what its `context` (or `cross_context`) stands for."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"{' and '.join(named)} cannot be given next to the LayerContext that holds it; put it into the "
            "LayerContext"
        )


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
