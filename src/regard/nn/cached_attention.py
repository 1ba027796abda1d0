"""Attention over cached keys: which positions a description depends on, and the offset that a cache implies."""

from __future__ import annotations

from torch import Tensor

from regard.attention import Attention
from regard.geometry import CallSlice, Frame
from regard.masks import Mask
from regard.masks.algebra import And, Not, Or
from regard.masks.explicit import Dense
from regard.masks.patterns import Dilated, Padding, Window, mask_by_distance
from regard.nn.cache import Cache, WindowCache
from regard.positions.biases import Bias, DenseBias, Diagonal, Shaw, Sum, is_built_in
from regard.scores import BUILT_IN


def depends_on_distance(attend: Attention) -> bool:
    """Whether the result depends only on distances between queries and keys, so that both can be shifted together."""
    return type(attend.score) in BUILT_IN and mask_by_distance(attend.mask) and _bias_by_distance(attend.bias)


def ignores_query_position(attend: Attention) -> bool:
    """Whether the result does not depend on the positions of queries."""
    mask = None if attend.mask is None else attend.mask.snapshot()
    return type(attend.score) in BUILT_IN and _mask_by_key(mask) and _bias_by_key(attend.bias)


def max_lookback(attend: Attention) -> int | None:
    """The largest distance to an earlier key that the mask allows, or None if it is unlimited."""
    reach = _max_lookback(attend.mask)
    if reach is None or attend.offset is None:
        return reach
    offsets = [attend.offset] if isinstance(attend.offset, int) else attend.offset.tolist()
    return max(reach - min(offsets), 0) if offsets else reach


def shift_to_cache(attend: Attention, cache: Cache, query: Tensor, d_value: int) -> Attention:
    """Return the description for queries (B, H, n, D) of the last n cached tokens, with all cached tokens as keys.

    Without a cache, query `i` is at position `offset + i` and key 0 at position 0. With one, the first query follows
    the tokens of earlier calls, and key 0 follows the dropped tokens.
    """
    if isinstance(cache, WindowCache) and ((reach := max_lookback(attend)) is None or reach >= cache.window):
        reached = "all earlier tokens" if reach is None else f"{reach} earlier tokens"
        raise ValueError(
            f"a query of {attend!r} attends to {reached}, but the WindowCache keeps {cache.window - 1}; "
            "use the cache that `attention.cache()` returns, or a Cache, which keeps all"
        )
    B, H, count, D = query.shape
    offset, dropped, seen = attend.offset, cache.dropped, cache.seen_tokens
    if offset is None and (not dropped or depends_on_distance(attend)):
        return attend  # the last query is at the last key
    first: int | Tensor = seen - count + (0 if offset is None else offset)
    if not dropped or depends_on_distance(attend):
        return attend.replace(offset=first - dropped)
    frame = Frame(B, H, count, seen, first)
    attend.check(frame, D, d_value)  # a tensor of the wrong size might fit the slice by chance
    return attend.narrow(frame, CallSlice(slice(0, H), slice(0, count), slice(dropped, seen)))


def _max_lookback(mask: Mask | Tensor | None) -> int | None:
    if isinstance(mask, Window):
        return mask.before
    if isinstance(mask, Dilated):
        return mask.width * mask.step
    if isinstance(mask, And):
        reaches = [_max_lookback(part) for part in mask.parts]
        limits = [reach for reach in reaches if reach is not None]
        return min(limits) if limits else None  # torch.compile does not trace `min(..., default=None)`
    if isinstance(mask, Or):
        reaches = [_max_lookback(part) for part in mask.parts]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)
    return None


def _mask_by_key(mask: Mask | Tensor | None) -> bool:
    if isinstance(mask, And | Or):
        return all(map(_mask_by_key, mask.parts))
    if isinstance(mask, Dense):
        return mask.tensor.shape[-2] == 1
    return _mask_by_key(mask.negated) if isinstance(mask, Not) else mask is None or isinstance(mask, Padding)


def _bias_by_distance(bias: Bias | Tensor | None) -> bool:
    if isinstance(bias, Bias) and not is_built_in(bias):
        return False
    if isinstance(bias, Sum):
        return all(map(_bias_by_distance, bias.terms))
    if isinstance(bias, DenseBias):
        return all(n == 1 for n in bias.tensor.shape[-2:])
    return bias is None or isinstance(bias, Diagonal | Shaw)


def _bias_by_key(bias: Bias | Tensor | None) -> bool:
    if isinstance(bias, Bias) and not is_built_in(bias):
        return False
    if isinstance(bias, Sum):
        return all(map(_bias_by_key, bias.terms))
    if isinstance(bias, DenseBias):
        return bias.tensor.dim() < 2 or bias.tensor.shape[-2] == 1
    return bias is None
