"""The recurrence of linear attention in the kernels for GPUs, in Triton's interpreter, against its definition."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.engines import derivatives, triton
from regard.linear import logs
from regard.linear import recurrence as dispatch
from regard.linear.recurrence import scan
from tests.linear.naive import draw, naive
from tests.linear.recurrence import draw_recurrence, recurrence
from tests.linear.test_recurrence import KINDS, results

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)
EXAMPLES = int(os.environ.get("REGARD_TRITON_EXAMPLES", "0"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(1, 1, 1), (2, 1, 1), (1, 1, 3), (2, 2, 4), (4, 2, 2)]


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    output, final, _ = derivatives.apply(dispatch._Recurrence(True, triton), *inputs)
    return output, final


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the kernels for GPUs compute calls on a CPU; returns the number of heads of each."""
    heads: list[int] = []
    for module in (dispatch, logs):
        monkeypatch.setattr(module, "kernels_for", lambda device: triton)
    forward = triton.recurrence_forward
    monkeypatch.setattr(triton, "recurrence_forward", lambda *given: heads.append(given[1]) or forward(*given))  # type: ignore[func-returns-value]
    return heads


def check(inputs: list[Any]) -> None:
    """Raise unless output, state and gradients are as near to those in float64 as torch's."""
    exact = results(recurrence, [None if x is None else x.double() for x in inputs])
    for ours, theirs, best in zip(results(run, inputs), results(scan, inputs), exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == best.shape
        error, yardstick = ((x.double() - best).abs().max() for x in (ours, theirs))
        assert error <= 2 * yardstick + 4 * torch.finfo(ours.dtype).eps * best.abs().max()


IN_16_BITS = [("channel", True, torch.bfloat16), ("head", True, torch.float16), (None, False, torch.bfloat16)]


@pytest.mark.parametrize(("decay", "beta", "dtype"), [(*kind, torch.float32) for kind in KINDS] + IN_16_BITS)
def test_results_and_gradients_are_those_of_the_recurrence(decay: str | None, beta: bool, dtype: torch.dtype) -> None:
    check(draw_recurrence(1, 21, 35, 19, (1, 1, 2), decay, beta, True, dtype=dtype, resets=(10,) if decay else ()))


@settings(max_examples=max(EXAMPLES // 10, 3), deadline=None)
@given(
    B=st.integers(1, 2), N=st.integers(1, 40), D=st.integers(1, 20), E=st.integers(1, 40),
    heads=st.sampled_from(HEADS), kind=st.sampled_from(KINDS), state=st.booleans(), apart=st.booleans(),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_equals_the_recurrence(
    B: int, N: int, D: int, E: int, heads: tuple[int, int, int], kind: tuple[str | None, bool], state: bool,
    apart: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    resets = (N // 3, N // 2) if kind[0] else ()
    inputs = draw_recurrence(B, N, D, E, heads, *kind, state, seed, dtype, resets)
    if apart:
        inputs = [x if x is None else x.transpose(-1, 1).contiguous().transpose(-1, 1) for x in inputs]
    check(inputs)


def test_widths_up_to_256_are_supported() -> None:
    check(draw_recurrence(1, 18, 256, 70, (1, 1, 1), "head", True, dtype=torch.float32))


@pytest.mark.parametrize(("decay", "beta"), [("head", True), ("channel", True)])
def test_strong_decays_neither_overflow_nor_hide_later_tokens(decay: str, beta: bool) -> None:
    inputs: list[Any] = draw_recurrence(1, 20, 5, 3, (1, 1, 1), decay, beta, True, dtype=torch.float32)
    inputs[3][:, :, 3:12:3] = -1e4
    inputs[3][:, :, 10] = -3e38
    inputs[3][:, :, 14:] = -1e-6
    check(inputs)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_without_a_gradient_contributes_none(used: int) -> None:
    inputs = draw_recurrence(1, 20, 4, 3, (1, 1, 1), "head", True, True, dtype=torch.float32)
    grads = []
    for function in (run, scan):
        leaves = [x.clone().requires_grad_() for x in inputs]
        grads.append(torch.autograd.grad(function(*leaves)[used].sin().sum(), leaves, allow_unused=True))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-4, atol=1e-5)


def test_results_are_bitwise_reproducible() -> None:
    inputs = draw_recurrence(1, 20, 12, 33, (1, 1, 2), "head", True, True, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(results(run, inputs), results(run, inputs), strict=True))


@pytest.mark.parametrize(("decay", "beta", "bad"), [("head", True, math.nan), ("channel", False, math.inf)])
def test_nan_reaches_no_earlier_token_and_none_after_a_reset(decay: str, beta: bool, bad: float) -> None:
    N, at, reset = 20, 8, 12
    clean = draw_recurrence(1, N, 3, 2, (1, 1, 1), decay, beta, dtype=torch.float32, resets=(reset,))
    visible = torch.ones(N, dtype=torch.bool)
    visible[at:reset] = False
    for index in (0, 1, 2):
        dirty: list[Any] = [None if x is None else x.clone() for x in clean]
        dirty[index][:, :, at] = bad
        outcomes = []
        for inputs in (clean, dirty):
            leaves: list[Any] = [None if x is None else x.clone().requires_grad_() for x in inputs]
            output = run(*leaves)[0][:, :, visible]
            outcomes.append([output, torch.autograd.grad(output.sum(), leaves[0])[0][:, :, visible]])
        for ours, theirs in zip(*outcomes, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("features", ["elu", rg.favor(20, seed=3)], ids=repr)
@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.padding([30, 3])], ids=repr)
def test_normalized_features_equal_their_definition(calls: list[int], features: Any, mask: rg.Mask) -> None:
    inputs = draw(2, 4, 2, 33, 30, 5, 3, torch.float32)
    grads = []
    for function in (rg.LinearAttention(features, mask), lambda *given: naive(features, mask, *given)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(*leaves)
        grads.append([output.double(), *torch.autograd.grad(output.sin().sum(), leaves)])
    assert calls == [4]
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_documents_steps_and_named_recurrences(calls: list[int]) -> None:
    q, k, v, g, b, _ = draw_recurrence(1, 30, 4, 3, (2, 2, 2), "head", True, dtype=torch.float32)
    attend, lengths = rg.LinearAttention.gated_deltanet(), [11, 19]
    whole, final = attend(q, k, v, decay=g, beta=b, return_state=True)
    torch.testing.assert_close(whole, recurrence(q, k, v, g, b)[0], rtol=1e-5, atol=1e-5)
    outputs: list[Tensor] = []
    state: Any = None
    for a, c, d, decay, beta in zip(*(x.split(lengths, 2) for x in (q, k, v, g, b)), strict=True):
        output, state = attend.step(a, c, d, state, decay=decay, beta=beta)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.sums, final.sums, rtol=1e-5, atol=1e-5)
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    packed = rg.LinearAttention("identity", rg.causal() & rg.documents(ids), normalize=False)(q, k, v, decay=g, beta=b)
    alone = attend(*(x[:, :, 11:] for x in (q, k, v)), decay=g[:, :, 11:], beta=b[:, :, 11:])
    torch.testing.assert_close(packed[:, :, 11:], alone, rtol=1e-5, atol=1e-5)
    assert calls == [2] * 5


def test_other_calls_are_computed_by_torch(calls: list[int]) -> None:
    q, k, v, g, _, _ = draw_recurrence(1, 6, 4, 3, (1, 1, 1), "head", dtype=torch.float32)
    assert "not in float64" in dispatch.why_not_kernels(q.double(), k.double(), v.double())
    assert "up to 256 features, but there are 300" in dispatch.why_not_kernels(q, k, v, features=300)
    attend = rg.LinearAttention("identity", rg.causal(), normalize=False)
    attend(q.double(), k.double(), v.double(), decay=g.double())
    rg.LinearAttention(rg.favor(300), rg.causal())(q, k, v)
    torch.func.vmap(lambda q, k, v: attend(q, k, v))(q[None], k[None], v[None])
    assert not calls


def test_second_derivatives_are_those_of_torch(calls: list[int]) -> None:
    inputs = draw_recurrence(1, 5, 3, 2, (1, 1, 1), "head", True, dtype=torch.float32)
    actual = []
    for function in (dispatch.run_recurrence, scan):
        leaves: list[Any] = [x if x is None else x.clone().requires_grad_() for x in inputs]
        (first,) = torch.autograd.grad(function(*leaves)[0].square().sum(), leaves[0], create_graph=True)
        actual.append([first, *torch.autograd.grad(first.square().sum(), leaves[:5])])
    assert calls
    for ours, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
