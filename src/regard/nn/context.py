"""State shared by all layers of one forward call: masks, biases and position tables, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention import Attention, Keys
from regard.masks import Mask, dense, padding
from regard.masks.patterns import mask_by_distance
from regard.nn.cache import Cache, Stored
from regard.nn.cached_attention import depends_on_distance
from regard.nn.rotary import Rotary, Table
from regard.positions import Bias, Dynamic, LongRope
from regard.positions.biases import dense_bias
from regard.sharding import current_sharding


class RelativePositions(NamedTuple):
    """Vectors of relative positions, and the one that belongs to each query and key of self-attention.

    A layer projects the vectors p like its inputs, and adds q_i · key(p) + k_j · query(p) with p = vectors[rows[i, j]]
    to the scores before they are scaled.
    """

    vectors: Tensor  # (R, d_model)
    rows: Tensor  # (N, N): indices of vectors


class SharedKeys(NamedTuple):
    """Keys and values (B, G, K, ...) that a layer computed, with those of its cache, if it has one."""

    keys: Keys
    values: Keys
    cache: Cache | None


class LayerContext:
    """Mask, bias and positions of one forward call. A stack builds one and passes it to every layer.

    mask: combined with the mask of each layer's own `Attention` by `&`.
    bias: added to the scores of every layer, in addition to the layer's own bias (T5 shares one across layers).
    positions: query positions for rotary embeddings, (N,) or (B, N) integers; by default 0 ... N - 1, after the tokens
        of the cache. In self-attention they are the key positions too; `key_positions` are those of a source.
    left_padding: number of padding tokens at the front of each batch row, (B,), for prompts of different lengths.
    query_position, key_position: added to the inputs of the query and key projections, but not to the values (DETR).
    relative: vectors of relative positions, for disentangled attention (DeBERTa); see `RelativePositions`.

    When sequences are sharded across processes, mask and bias describe the full sequence; `to_local` takes the local
    shard of the rest, and `is_local` is True once that has been done.
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
        relative: RelativePositions | None = None,
    ) -> None:
        self.mask = dense(mask) if isinstance(mask, Tensor) else mask
        self.bias = dense_bias(bias) if isinstance(bias, Tensor) else bias
        self.positions, self.key_positions = positions, key_positions
        self.left_padding, self._longest_left_padding = (
            left_padding,
            0 if left_padding is None else int(left_padding.max()),
        )
        self.query_position, self.key_position, self.relative = query_position, key_position, relative
        self.is_local = False
        self._combined: dict[tuple[Attention, bool, bool, int | None], Attention] = {}
        self._tables: dict[tuple, Table] = {}
        self._shared: dict[object, list[SharedKeys]] = {}  # by the layer that computed them, one entry per reader

    def combine(self, own: Attention, cache: Cache | None = None) -> Attention:
        """Return `own` with the mask and bias of this call. Layers that share `own` share the result and its plans.

        cache: the cache that holds the keys, if there is one.
        """
        dropped = 0 if cache is None else cache.dropped
        left_padding = self.left_padding if self._longest_left_padding > dropped else None
        keys = None  # the number of keys, if some rows have fewer than their padding so far
        if left_padding is not None and cache is not None and cache.seen_tokens < self._longest_left_padding:
            keys = cache.seen_tokens
            left_padding = left_padding.clamp(max=keys)
        # Offset 0 is the default without a cache; with one, the queries are at the end of the keys.
        at_end = cache is not None and isinstance(own.offset, int) and own.offset == 0
        if self.mask is None and self.bias is None and left_padding is None and not at_end:
            return own
        result = self._combined.get(key := (own, at_end, left_padding is None, keys))
        if result is None:
            mask, bias = own.mask, own.bias
            if self.mask is not None:
                mask = self.mask if mask is None else mask & self.mask
            if left_padding is not None:
                if not depends_on_distance(own):
                    raise ValueError(
                        f"{own!r} counts positions from the first key, which is padding in some rows of the batch; "
                        "generate from prompts of equal length"
                    )
                mask = ~padding(left_padding) if mask is None else mask & ~padding(left_padding)
            if self.bias is not None:
                bias = self.bias if bias is None else bias + self.bias
            result = own.replace(mask=mask, bias=bias, offset=None if at_end else own.offset)
            self._combined[key] = result
        return result

    def share(self, layer: object, stored: Stored, cache: Cache | None, readers: int) -> None:
        """Keep the keys and values of a layer until `readers` other layers have taken them."""
        self._shared[layer] = [SharedKeys(stored[0], stored[1], cache)] * readers

    def take_shared(self, layer: object) -> SharedKeys | None:
        """Return the keys and values of a layer, once per reader."""
        left = self._shared.get(layer)
        return left.pop() if left else None

    def with_bias(self, bias: Bias) -> LayerContext:
        """Return a copy with `bias` added."""
        other = copy(self)
        other.bias, other._combined = bias if self.bias is None else self.bias + bias, {}
        return other

    def with_relative(self, relative: RelativePositions) -> LayerContext:
        """Return a copy with vectors of relative positions."""
        other = copy(self)
        other.relative = relative
        return other

    def with_positions(self, positions: Tensor) -> LayerContext:
        """Return a copy at other positions, such as the next step of generation; combined descriptions are kept."""
        other = copy(self)
        other.positions, other._tables = positions, {}
        return other

    def to_local(self) -> LayerContext:
        """Return the context for the tokens of this process when sequences are sharded."""
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
        """Return the rotary table for the tokens of `like` (B, N, ...), by default at `start` ... start + N - 1.

        of_source: whether the tokens are keys of cross-attention.
        """
        # A symbolic length must not be a dictionary key: tracing would specialise on it.
        key = rotary, d_head, 0 if torch.compiler.is_compiling() else like.shape[1], start, of_source
        result = self._tables.get(key)
        if result is None:
            positions, sharding = self.key_positions if of_source else self.positions, current_sharding()
            local = None
            if sharding is not None and (positions is None or rotary.scaling is not None):
                local = sharding.positions(like.shape[1], like.device)
            if positions is None:
                # not arange(start, start + N): torch.compile takes the end for N after a graph break
                positions = torch.arange(like.shape[1], device=like.device) + start if local is None else local
            elif positions.shape[-1:] != like.shape[1:2] or positions.shape[:-1] not in ((), (1,), like.shape[:1]):
                raise ValueError(
                    f"positions must be (N,) or (B, N) = {tuple(like.shape[:2])}, got {tuple(positions.shape)}"
                )
            if sharding is not None and rotary.scaling is not None:  # scaling depends on the full sequence
                positions = sharding.full_tensor(positions, -1)
            if isinstance(rotary.scaling, Dynamic | LongRope):
                self._check_dynamic(rotary.scaling, positions, start)
            result = rotary.table(positions, d_head, like.dtype)
            if local is not None and rotary.scaling is not None:
                result = result[0].index_select(-3, local), result[1].index_select(-3, local)
            self._tables[key] = result
        return result

    def _check_dynamic(self, scaling: Dynamic | LongRope, positions: Tensor, start: int) -> None:
        """Raise if the sequence length that dynamic scaling needs cannot be read off the positions."""
        if torch.compiler.is_compiling() or not positions.numel() or int(positions.max()) < scaling.original:
            return
        if start and not (isinstance(scaling, LongRope) and _all_longer(positions, scaling.original)):
            raise ValueError(
                f"{scaling!r} rotates every key by the length of the full sequence beyond {scaling.original} tokens, "
                "but cached keys were rotated for a shorter one; compute the full sequence without a cache, or use "
                "Yarn, Linear or Llama3 scaling"
            )
        if positions.dim() == 1 and (not mask_by_distance(self.mask) or bool((positions.diff() < 1).any())):
            raise ValueError(
                f"{scaling!r} depends on the length of each sequence beyond {scaling.original} tokens, which positions "
                "(N,) do not determine for padded or packed sequences; pad on the left, or pass positions (B, N) that "
                "repeat the last position of a row in its padding"
            )


def _all_longer(positions: Tensor, length: int) -> bool:
    """Whether the cached tokens of every row that exceeds `length` did so before this call."""
    return bool(((positions[..., 0] > length) | (positions[..., -1] < length)).all())


def check_not_in_context(**given: object) -> None:
    """Raise if an argument is given that belongs into the `context` (or `cross_context`) of the call."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"{' and '.join(named)} cannot be combined with a context; pass it to LayerContext(...) instead"
        )


def context_of_call(
    context: LayerContext | None,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    positions: Tensor | None,
    *,
    rotates: bool,
) -> LayerContext:
    """Return the context of a layer's call: the one given, or a new one of the other arguments, which exclude it.

    rotates: whether the layer has rotary embeddings, the only use of `positions`.
    """
    if context is None:
        if positions is not None and not rotates:
            raise ValueError(
                "positions are used by rotary embeddings only; construct this layer with `rotary=Rotary()`"
            )
        return LayerContext(mask, bias, positions)
    check_not_in_context(mask=mask, bias=bias, positions=positions)
    if current_sharding() is not None and not context.is_local:
        raise ValueError("when sequences are sharded, a layer takes the local tokens and `context.to_local()`")
    return context


def check_mask(mask: Tensor, shape: Sequence[int] | None = None) -> None:
    """Raise unless `mask` is a (B, N) bool tensor; `shape` is the expected (B, N), if known."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        given = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a (B, N) bool tensor, True for real tokens, got {given}; try mask.bool()")
    if shape is not None and mask.shape != torch.Size(shape):
        raise ValueError(f"mask must be (B, N) = {tuple(shape)} like the tokens, got {tuple(mask.shape)}")


def key_mask(mask: Tensor | None, tokens: Tensor | None = None) -> Mask | None:
    """Convert a (B, N) bool mask of real tokens to the cheapest equivalent key mask, or None if all are real.

    tokens: (B, N, ...), to check the shape of the mask against.
    """
    if mask is None:
        return None
    check_mask(mask, None if tokens is None else tokens.shape[:2])
    if torch.compiler.is_compiling():
        return dense(mask[:, None, None])
    if bool(mask.all()):
        return None
    lengths, positions = mask.sum(1), torch.arange(mask.shape[1], device=mask.device)
    if torch.equal(mask, positions < lengths[:, None]):
        return padding(lengths)
    if torch.equal(mask, positions >= mask.shape[1] - lengths[:, None]):
        return ~padding(mask.shape[1] - lengths)
    return dense(mask[:, None, None])
