"""The fused kernel of linear attention against torch, and the calls that are left to torch."""

import math

import pytest
import torch

from regard.engines import native
from regard.linear import LinearAttention
from regard.masks import causal, padding
from tests.linear.naive import FEATURES, draw

compiled = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")
SIZES = [(1, 1, 1, 1, 1, 1), (2, 4, 2, 33, 5, 3), (1, 2, 1, 130, 17, 33), (1, 3, 1, 64, 16, 1), (1, 1, 1, 300, 64, 64)]


def both_ways(monkeypatch, attend, inputs):
    """Return output and gradients by the kernel, and by torch."""
    calls = []
    forward = native.linear_forward
    monkeypatch.setattr(native, "linear_forward", lambda *given: calls.append(1) or forward(*given))
    results = []
    for reason in ("", "not now"):
        monkeypatch.setattr(native, "why_missing", lambda reason=reason: reason)
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = attend(*leaves)
        results.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    assert len(calls) == 1
    return results


@compiled
@pytest.mark.parametrize("sizes", SIZES, ids=repr)
@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_the_kernel_equals_torch(monkeypatch, features, sizes):
    B, H, G, N, D, E = sizes
    attend = LinearAttention(features, causal())
    for ours, theirs in zip(*both_ways(monkeypatch, attend, draw(B, H, G, N, N, D, E)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@compiled
@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_the_kernel_supports_padding_and_queries_before_the_first_key(monkeypatch, features):
    q, k, v = draw(2, 2, 1, 80, 70, 6, 5)
    k[1, :, 40:], v[1, :, 40:] = math.nan, math.inf
    attend = LinearAttention(features, causal() & padding([70, 40]))
    for ours, theirs in zip(*both_ways(monkeypatch, attend, [q, k, v]), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_the_kernel_is_as_near_to_float64_as_torch(monkeypatch, features, dtype):
    attend, exact = LinearAttention(features, causal()), [x.to(dtype).double() for x in draw(1, 2, 2, 200, 200, 16, 8)]
    ours, theirs = both_ways(monkeypatch, attend, [x.to(dtype) for x in exact])
    monkeypatch.setattr(native, "why_missing", lambda: "not now")
    leaves = [x.requires_grad_() for x in exact]
    best = attend(*leaves)
    best = [best, *torch.autograd.grad(best.sin().sum(), leaves)]
    for a, b, c in zip(ours, theirs, best, strict=True):
        assert a.dtype == dtype
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 4 * torch.finfo(dtype).eps * c.abs().max()


@compiled
@pytest.mark.parametrize("features", FEATURES, ids=repr)
def test_the_kernel_is_bitwise_reproducible(features):
    inputs = [x.requires_grad_() for x in draw(1, 2, 1, 1100, 1100, 9, 7)]
    spoiled = [torch.full_like(x, math.nan).requires_grad_() for x in inputs]
    attend, before, outcomes = LinearAttention(features, causal()), torch.get_num_threads(), []

    def results(inputs):
        output = attend(*inputs)
        return [output, *torch.autograd.grad(output.sum(), inputs)]

    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            first = results(inputs)
            results(spoiled)
            assert all(torch.equal(a, b) for a, b in zip(first, results(inputs), strict=True))
            outcomes.append(first)
    finally:
        torch.set_num_threads(before)
    for other in outcomes[1:]:
        for a, b in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@compiled
@pytest.mark.parametrize("low", [-60.0, -500.0])
def test_features_that_float32_cannot_sum_are_left_to_torch(monkeypatch, low):
    q, k, v = (x.float() for x in draw(1, 1, 1, 50, 50, 4, 3))
    k[:, :, :20] += low  # the first queries see nothing but these
    monkeypatch.setattr(native, "linear_forward", lambda *given: pytest.fail("the kernel was called"))
    ours = LinearAttention("elu", causal())(q, k, v)
    torch.testing.assert_close(ours, LinearAttention("elu", causal())(q.double(), k.double(), v.double()).float())
