"""Numerical properties: dtypes, ranges and sums."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.check.case import Case
from regard.check.oracle import error, exact
from regard.check.property import Attend, conformance_property

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


@conformance_property(cases=[Case(dtype=dtype) for dtype in DTYPES])
def output_dtype(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The output has the dtype of its inputs: a silent promotion doubles memory and breaks the next layer."""
    out = attend(q, k, v)
    assert out.dtype == q.dtype, f"{q.dtype} in, {out.dtype} out"


@conformance_property(cases=(Case(Q=1, K=1, D=1), Case(Q=1, D=1), Case(H=2, Q=5, K=33, D=1)))
def large_logits(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Logits of any size give finite outputs: softmax subtracts the maximum before the exponential."""
    ranks = torch.arange(k.shape[2], dtype=q.dtype).reshape(1, 1, -1, 1).expand_as(k)
    for size in (1e2, 1e4, 1e30):
        out, last = attend(torch.ones_like(q), size * ranks, v), v[:, :, -1:].expand_as(q)
        assert error(out, last) < 8, (
            f"logits up to {size:g}: the output is {out[0, 0, 0, 0]}, expected {last[0, 0, 0, 0]}"
        )
        out, mean = attend(torch.ones_like(q), torch.full_like(k, -size), v), v.mean(2, keepdim=True).expand_as(q)
        assert error(out, mean) < 32, (
            f"all logits {-size:g}: the output is {out[0, 0, 0, 0]}, expected {mean[0, 0, 0, 0]}"
        )


@conformance_property(
    cases=[Case(Q=1, K=K, D=D, dtype=dtype) for K, D in ((1, 1), (2, 2), (64, 8), (4096, 4)) for dtype in HALVES]
)
def half_accumulation(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """bfloat16 and float16 are summed in float32: the error is one rounding of the result, for any number of keys."""
    v = v.abs() + 1
    far = error(attend(q, k, v), exact(q, k, v))
    assert far < 3, f"{k.shape[2]} keys in {q.dtype}: {far:.3g} of its roundings from float64, expected at most 3"


@conformance_property(
    cases=(Case(Q=1, K=1, D=64, dtype=torch.float16), Case(H=2, Q=3, K=17, D=64, dtype=torch.float16))
)
def half_range(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Products beyond 65504 do not overflow in float16 if the scaled logits are in range."""
    q, k = torch.full_like(q, 40.0), torch.full_like(k, 40.0)
    out = attend(q, k, v)
    far = error(out, exact(q, k, v))
    assert far < 3, f"products of {64 * 1600}, logits of {8 * 1600}: the output is {out.flatten()[0].item():.5g}"
