"""The functions of the `flash_attn` package with their documented arguments, on any device that regard supports.

    from regard.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are (batch, sequence, heads, width), a causal mask is aligned at the bottom right, and a row that sees no key
returns 0, as there. Differences: the log-sum-exp of such a row is -inf, all dtypes of regard are accepted, results are
always deterministic, and `return_attn_probs=True` returns None in place of the dropped weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.functional import attention
from regard.geometry import format_shape
from regard.masks import Mask, causal, padding, varlen, window
from regard.positions import Bias, alibi
from regard.scores import Dot

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_UNBOUNDED = 2**31 - 1
Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of q (B, Q, H, D) to k and v (B, K, G, D); returns (B, Q, H, D).

    `return_attn_probs=True` also returns the log-sum-exp (B, H, Q) and None.

    >>> import torch
    >>> from regard.integrations.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 16, 4, 8)
    >>> flash_attn_func(q, k, v, causal=True, window_size=(7, 0)).shape
    torch.Size([2, 16, 4, 8])
    """
    _check_axes({"q": q, "k": k, "v": v}, 4, "(batch, sequence, heads, width)")
    output, lse = attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score=_score(softmax_scale, softcap, q),
        mask=_distance_mask(causal, window_size),
        bias=_alibi(alibi_slopes),
        dropout=dropout_p,
        return_lse=True,
    )
    output = output.transpose(1, 2)
    return (output, lse, None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention inside sequences packed one after another: q (total, H, D), k and v (total, G, D).

    With `block_table` (sequences, pages), k and v are a paged cache (pages, page size, G, D). The longest lengths are
    not needed and not read. `return_attn_probs=True` also returns the log-sum-exp (H, total) and None.

    >>> import torch
    >>> from regard.integrations.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 8)
    >>> edges = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, edges, edges, 7, 7, causal=True).shape
    torch.Size([10, 4, 8])
    """
    if block_table is not None:
        lengths = cu_seqlens_k.diff()
        k, v = (torch.cat(_read_pages(cache, block_table, lengths)) for cache in (k, v))
    _check_axes({"q": q, "k": k, "v": v}, 3, "(total tokens, heads, width)")
    if alibi_slopes is not None and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError(
            "alibi_slopes needs sequences with as many queries as keys: the bias depends on positions in the packed "
            "tensors; call flash_attn_func for each sequence"
        )
    output, lse = attention(
        *(x.transpose(0, 1) for x in (q, k, v)),
        score=_score(softmax_scale, softcap, q),
        mask=varlen(cu_seqlens_q, cu_seqlens_k, mask=_distance_mask(causal, window_size)),
        bias=_alibi(alibi_slopes),
        offset=0,
        dropout=dropout_p,
        return_lse=True,
    )
    output = output.transpose(0, 1)
    return (output, lse, None) if return_attn_probs else output


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Q, H, D) to a cache, which k and v (B, N, G, D) extend in place first. Not differentiable.

    The cache is (B, capacity, G, D), or (pages, page size, G, D) with `block_table` (B, pages per row); its pages are
    copied into one tensor per call. `cache_seqlens` is the number of keys already in the cache, one or per row. New
    keys and queries are rotated by `rotary_cos` and `rotary_sin` (positions, width / 2) if given.

    >>> import torch
    >>> from regard.integrations.flash_attn import flash_attn_with_kvcache
    >>> cache = torch.zeros(2, 1, 32, 2, 8)  # keys and values
    >>> q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=5, causal=True).shape
    torch.Size([1, 3, 4, 8])
    >>> torch.equal(cache[0, :, 5:8], k)
    True
    """
    _check_axes({"q": q, "k_cache": k_cache, "v_cache": v_cache}, 4, "(batch, sequence, heads, width)")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError(
            "rotary_cos and rotary_sin need new keys and values, k and v, which they rotate as the queries"
        )
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(
            "cache_batch_idx cannot be combined with block_table, whose rows are those of q; reorder those"
        )
    batch, queries = q.shape[:2]
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("k and v need cache_seqlens, the number of keys that are already in the cache")
        cache_seqlens = capacity
    before = torch.as_tensor(cache_seqlens, dtype=torch.int64, device=q.device).expand(batch)
    total = before if k is None else before + k.shape[1]
    if int(total.max()) > capacity or int(before.min()) < 0:
        raise ValueError(f"the cache holds {capacity} keys, but {int(total.max())} are needed; allocate a longer cache")
    rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    local = causal or tuple(window_size) != (-1, -1)
    if rotary_cos is not None and rotary_sin is not None:
        places = before[:, None] + torch.arange(queries, device=q.device) * int(local)
        q = _rotate(q, rotary_cos, rotary_sin, places, rotary_interleaved)
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if k is not None and v is not None:
        places = before[:, None] + torch.arange(k.shape[1], device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            k = _rotate(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        if block_table is None:
            k_cache[rows[:, None], places], v_cache[rows[:, None], places] = k.to(k_cache), v.to(v_cache)
        else:
            size = k_cache.shape[1]
            page, slot = block_table.long().gather(1, places // size), places % size
            k_cache[page, slot], v_cache[page, slot] = k.to(k_cache), v.to(v_cache)
    longest = int(total.max())
    if block_table is not None:
        size = k_cache.shape[1]
        pages = block_table.long()[:, : -(-longest // size)]
        used = torch.arange(pages.shape[1], device=q.device) * size < total[:, None]  # others may hold anything
        pages = torch.where(used, pages, 0)
        keys, values = (cache[pages].flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))
    elif cache_batch_idx is None:
        keys, values = k_cache[:batch, :longest], v_cache[:batch, :longest]
    else:
        keys, values = k_cache[rows, :longest], v_cache[rows, :longest]
    mask: Mask = padding(total)
    if cache_leftpad is not None:
        mask = mask & ~padding(cache_leftpad)
    if (inside := _distance_mask(causal, window_size)) is not None:
        mask = mask & inside
    output, lse = attention(
        *(x.transpose(1, 2) for x in (q, keys, values)),
        score=_score(softmax_scale, softcap, q),
        mask=mask,
        bias=_alibi(alibi_slopes),
        offset=total - queries,
        return_lse=True,
    )
    output = output.transpose(1, 2)
    return (output, lse) if return_softmax_lse else output


def _score(softmax_scale: float | None, softcap: float, q: Tensor) -> Dot:
    return Dot(scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap=softcap or None)


def _distance_mask(is_causal: bool, window_size: Window) -> Mask | None:
    """Return the mask of a causal flag and a window, in which -1 is unbounded."""
    left, right = window_size
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        return None
    if left < 0 and right == 0:
        return causal()
    return window(left if left >= 0 else _UNBOUNDED, right if right >= 0 else _UNBOUNDED)


def _alibi(slopes: Tensor | None) -> Bias | None:
    if slopes is None:
        return None
    if slopes.dim() != 1:
        raise NotImplementedError(
            f"alibi_slopes must be one per head, (H,), but is {format_shape(slopes)}; slopes per batch row are not "
            "supported, so call once per row"
        )
    return alibi(slopes=slopes)


def _read_pages(cache: Tensor, block_table: Tensor, lengths: Tensor) -> list[Tensor]:
    """Return the first `lengths[b]` entries of each row of a paged cache (pages, page size, G, D)."""
    size, table = cache.shape[1], block_table.long()
    return [
        cache[pages[: -(-length // size)]].flatten(0, 1)[:length]
        for pages, length in zip(table, lengths.tolist(), strict=True)
    ]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first channels of x (B, N, H, D) by the angles of their places (B, N)."""
    cos, sin = (table[places][:, :, None].to(torch.promote_types(x.dtype, torch.float32)) for table in (cos, sin))
    rotated, rest = x[..., : 2 * cos.shape[-1]].to(cos.dtype), x[..., 2 * cos.shape[-1] :]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)


def _check_axes(tensors: dict[str, Tensor], axes: int, form: str) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != axes:
            actual = format_shape(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be {form}, but is {actual}")
