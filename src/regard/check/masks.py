"""Properties of masks: `True` means *may attend*, and masked keys have no influence."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.check.case import Case, with_float64
from regard.check.oracle import error, exact
from regard.check.property import Attend, conformance_property
from regard.check.targets.target import NotSupported

SIZES = (Case(Q=1), Case(Q=3, K=5), Case(B=2, H=2, Q=9, K=33, D=4), Case(B=2, H=3, Q=65, K=130, D=8))
SQUARE = (Case(Q=1, K=1), Case(), Case(H=2, Q=5, K=5, D=4), Case(B=2, H=2, Q=19, K=19, D=8))
BEYOND = (129, 257, 513, 1025)  # keys: one more than a few tiles of 64, 128 and 256
LONG = tuple(Case(Q=3, K=n, D=4) for n in BEYOND)
LONG_ROWS = tuple(Case(B=2, H=2, Q=3, K=n, D=4) for n in BEYOND)
LONG_SQUARE = tuple(Case(Q=n, K=n, D=4) for n in BEYOND)


@conformance_property("mask", cases=(Case(Q=1, D=1), Case(H=2, Q=3), *LONG))
def mask_polarity(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """`True` means may attend: with the wrong convention a model trains on the keys that should be hidden."""
    visible = torch.arange(k.shape[2]) < k.shape[2] // 2
    v = torch.where(visible.unsqueeze(-1), torch.ones_like(v), -torch.ones_like(v))
    out = attend(torch.zeros_like(q), k, v, mask=visible.expand(*q.shape[:3], k.shape[2]))
    assert (out > 0).all(), "values of keys with True are 1 and the others -1, but the output is negative"


@conformance_property(
    "mask",
    cases=(Case(B=2, Q=1), Case(H=2, Q=1), Case(B=2, H=3, Q=3, K=5), Case(B=3, H=2, Q=33, K=65, D=8), *LONG_ROWS),
)
def mask_per_head(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """Every batch row and head has its part of the mask: padding differs between texts."""
    mask = ~mask
    mask[..., -1] = True
    together = attend(q, k, v, mask=mask)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            at = (slice(b, b + 1), slice(h, h + 1))
            far = error(together[at], attend(q[at], k[at], v[at], mask=mask[at]))
            assert far < 32, f"batch row {b}, head {h} alone, with its mask, differs by {far:.3g} roundings"


@conformance_property("mask", cases=(*SIZES, *LONG))
def mask_excludes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A masked key has weight 0, not a small one: its content does not change the output."""
    hidden = [j for j in range(1, k.shape[2]) if j == k.shape[2] - 1 or j % 64 in (0, 63)]  # also at the edges of tiles
    mask[..., hidden] = False
    before = attend(q, k, v, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, hidden], v[:, :, hidden] = 10 * q.mean(2, keepdim=True).sign(), 1000.0
    far = error(attend(q, k, v, mask=mask), before)
    assert far < 8, f"the content of a masked key and value changes the output by {far:.3g} roundings"


@conformance_property("mask", cases=(Case(), Case(B=2, H=3, Q=4, K=6), Case(B=3, H=2, Q=33, K=65, D=8), *LONG_ROWS))
def mask_broadcast(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A mask of size 1 along an axis is broadcast: (B, 1, 1, K) is padding, (1, 1, Q, K) is shared by all heads."""
    whole = mask.shape
    for part in (mask[:, :1, :1], mask[:1, :1], mask[:1], mask[:, :, :1]):
        far = error(attend(q, k, v, mask=part), attend(q, k, v, mask=part.expand(whole).contiguous()))
        assert far < 8, (
            f"a mask of {tuple(part.shape)} differs from the same one of {tuple(whole)} by {far:.3g} roundings"
        )


@conformance_property("mask", cases=(Case(Q=1, K=1, D=1), Case(Q=2, K=3), Case(B=2, H=2, Q=9, K=33, D=4), *LONG_SQUARE))
def masked_rows(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A row without visible keys is 0, not NaN and not a mean of hidden values: padding creates such rows."""
    hidden = [i for i in range(q.shape[2]) if i % 64 in (0, 63)]
    mask[..., hidden, :] = False
    out = attend(q, k, v, mask=mask)[..., hidden, :]
    assert (out == 0).all(), f"a row without any visible key is {out.flatten()[0].item():.5g}, expected 0"


@conformance_property("mask", cases=(*SIZES, *LONG))
def nan_leaks(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """NaN and infinity in masked keys and values do not reach the output: padding is often uninitialised memory."""
    hidden = [j for j in range(1, k.shape[2]) if j == k.shape[2] - 1 or j % 64 in (0, 63)]  # also at the edges of tiles
    mask[..., hidden] = False
    before = attend(q, k, v, mask=mask)
    for bad in (float("nan"), float("inf")):
        for name in ("key", "value"):
            k_bad, v_bad = k.clone(), v.clone()
            (k_bad if name == "key" else v_bad)[:, :, hidden] = bad
            out = attend(q, k_bad, v_bad, mask=mask)
            assert out.isfinite().all(), f"{bad} in a masked {name} gives {out.flatten()[0].item()}"
            assert error(out, before) < 8, f"{bad} in a masked {name} changes the output"


@conformance_property("mask", cases=(Case(Q=1, K=3), Case(B=2, H=2, Q=5, K=9, D=4), *LONG))
def edited_mask(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A mask that is edited in place between two calls is read again: mask buffers are reused."""

    def write(keys: slice, how: str) -> None:
        if how == "in place":
            mask[..., keys] = False
        elif how == "through .data":  # does not increase the version counter
            mask.data[..., keys] = False
        else:
            mask.numpy()[..., keys] = False

    attend(q, k, v, mask=mask)
    for n, how in enumerate(("in place", "through .data", "through numpy")):
        at = k.shape[2] - 1 - n if k.shape[2] > 3 else -1
        mask[..., at] = True
        attend(q, k, v, mask=mask)
        write(slice(at, None), how)
        far = error(attend(q, k, v, mask=mask), attend(q, k, v, mask=mask.clone()))
        assert far < 8, f"a mask edited {how} is not read again: {far:.3g} roundings from a copy of it"


@conformance_property("mask", cases=with_float64((*SIZES, *LONG, *LONG_SQUARE)))
def mask_definition(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """With a mask, the output is that of the definition in float64, for any number of keys."""
    far = error(attend(q, k, v, mask=mask), exact(q, k, v, mask))
    assert far < 32, f"differs from the definition under a mask by {far:.3g} roundings"


@conformance_property("causal", cases=(*SQUARE, *LONG_SQUARE))
def causal(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """With as many queries as keys, query i attends to keys 0 to i and to no future key."""
    out = attend(q, k, v, causal=True)
    for i in range(q.shape[2]):
        if 64 < i < q.shape[2] - 1 and i % 64 not in (0, 1, 63):
            continue  # in later tiles, check the edges only
        row, visible = q[:, :, i : i + 1], slice(0, i + 1)
        far = error(out[:, :, i : i + 1], attend(row, k[:, :, visible], v[:, :, visible]))
        assert far < 32, f"query {i} differs from attention over keys 0 to {i} by {far:.3g} roundings"


@conformance_property(
    "causal",
    cases=(
        Case(Q=1, K=2), Case(Q=2, K=3), Case(Q=2, K=1), Case(H=2, Q=4, K=19), *LONG,
        *(Case(Q=n // 2 + 1, K=n, D=4) for n in BEYOND),
    ),
)  # fmt: skip
def alignment(attend: Attend, q: Tensor, k: Tensor, v: Tensor, alignment: str) -> str:
    """With different numbers of queries and keys, the causal mask is aligned as promised.

    At the bottom right the last query attends to all keys, as decoding with a cache needs; at the top left the first
    query attends to the first key only.
    """
    out, far = attend(q, k, v, causal=True), {}
    for name, first in (("bottom-right", k.shape[2] - q.shape[2]), ("top-left", 0)):
        see = [i for i in range(q.shape[2]) if first + i >= 0]  # causal-empty-rows checks the others
        see = [i for i in see if i < 4 or i % 64 in (0, 63) or i == q.shape[2] - 1]
        ends = [first + i + 1 for i in see]
        rows = [attend(q[:, :, i : i + 1], k[:, :, :end], v[:, :, :end]) for i, end in zip(see, ends, strict=True)]
        far[name] = error(out[:, :, see], torch.cat(rows, 2))
    matching = [name for name, by in far.items() if by < 32]
    which = f"is {matching[0]}" if matching else f"is neither alignment; it differs by {far[alignment]:.3g} roundings"
    assert alignment in matching, f"the causal mask of {q.shape[2]} x {k.shape[2]} is promised {alignment}, but {which}"
    return f"causal mask at the {alignment}, as promised"


@conformance_property(
    "causal",
    cases=(
        Case(Q=2, K=1), Case(Q=3, K=2), Case(B=2, H=2, Q=19, K=5, D=4), *(Case(Q=2 * n, K=n, D=4) for n in BEYOND)
    ),
)  # fmt: skip
def causal_empty_rows(attend: Attend, q: Tensor, k: Tensor, v: Tensor, alignment: str) -> None:
    """With more queries than keys and a mask at the bottom right, the first queries see no key and are 0."""
    if alignment == "top-left":
        raise NotSupported("at the top left every query sees the first key")
    out = attend(q, k, v, causal=True)[:, :, : q.shape[2] - k.shape[2]]
    assert (out == 0).all(), (
        f"query 0 of {q.shape[2]} may attend to none of {k.shape[2]} keys, but is {out.flatten()[0].item():.5g}"
    )


@conformance_property("causal", cases=(Case(), Case(H=2, Q=5, K=5, D=4), Case(B=2, H=2, Q=33, K=33, D=8), *LONG_SQUARE))
def causal_nan_leaks(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """NaN in future keys and values does not reach the past: the rest of a cache buffer is uninitialised."""
    before = attend(q, k, v, causal=True)
    for name in ("key", "value"):
        for at in sorted({k.shape[2] - 1, (k.shape[2] + 1) // 2}):
            k_bad, v_bad = k.clone(), v.clone()
            (k_bad if name == "key" else v_bad)[:, :, at:] = float("nan")
            out = attend(q, k_bad, v_bad, causal=True)[:, :, :at]
            assert error(out, before[:, :, :at]) < 8, (
                f"NaN in the {name} at {at} reaches the queries before it: {out.flatten()[0].item()}"
            )


@conformance_property(
    "causal", "mask", "causal-and-mask",
    cases=(Case(), Case(H=2, Q=5, K=5, D=4), Case(B=2, H=2, Q=33, K=33, D=8), *LONG_SQUARE),
)  # fmt: skip
def causal_and_mask(attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    """A causal mask and another mask are combined: neither silently replaces the other."""
    both = attend(q, k, v, mask=mask, causal=True)
    far = error(both, attend(q, k, v, mask=mask & torch.ones_like(mask).tril()))
    assert far < 32, f"differs from the combined mask by {far:.3g} roundings"
