"""Every engine agrees with the reference in float64; test_rounding.py compares all of them with the definition."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import assume, given, seed, settings
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES
from tests.definition import Reader, dense
from tests.strategies import Call, calls

FAST = [name for name in ENGINES if name not in ("reference", "flex", "triton")]  # triton has no float64
OTHERS = [name for name in FAST if name != "native"]  # native has a thousand calls in a separate test
PARTS = 8
THOUSAND = int(os.environ.get("REGARD_EXAMPLES", "1000"))


def results(call: Call, engine: str, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    if lse:
        return rg.attention(call.query, call.key, call.value, engine=engine, return_lse=True, **call.description)
    return rg.attention(call.query, call.key, call.value, engine=engine, **call.description), None


def can(call: Call, engine: str, lse: bool = True) -> bool:
    problem = rg.Attention(**call.description).problem(call.query, call.key, call.value, return_lse=lse)
    return not ENGINES[engine].why_not(problem)


def everything(call: Call, engine: str, lse: bool = True) -> list[Tensor | None]:
    """Return output, log-sum-exp, and all gradients."""
    inputs = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    output, logsum = results(Call(*inputs, call.description), engine, lse)
    generator = torch.Generator().manual_seed(0)
    loss = (output * torch.randn(output.shape, generator=generator, dtype=output.dtype)).sum()
    if logsum is not None:
        loss = loss + logsum.masked_fill(logsum == float("-inf"), 0.0).sin().sum()
    gradients = torch.autograd.grad(loss, [*inputs, *call.learned], allow_unused=True)
    return [output.detach(), logsum if logsum is None else logsum.detach(), *gradients]


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_close_gradients(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for actual, other in zip(ours, theirs, strict=True):
        if other is not None:  # a tensor that no visited tile uses has no gradient, or zeros
            actual = torch.zeros_like(other) if actual is None else actual
            assert actual.isfinite().all()
            assert_close(actual, other, 1e-10)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_random_calls_of_the_native_engine_equal_the_reference_in_float64(part: int) -> None:
    @seed(part)
    @settings(max_examples=THOUSAND // PARTS)
    @given(call=calls(longest=24))
    def agrees(call: Call) -> None:
        assume(can(call, "native"))
        ours, theirs = (everything(call, engine) for engine in ("native", "reference"))
        for actual, other in zip(ours[:2], theirs[:2], strict=True):
            assert actual is not None
            assert other is not None
            assert_close(actual, other, 1e-12)
        assert_close_gradients(ours[2:], theirs[2:])

    agrees()


@pytest.mark.parametrize("engine", OTHERS)
@settings(max_examples=150)
@given(call=calls())
def test_output_equals_the_reference_in_float64(engine: str, call: Call) -> None:
    with torch.no_grad():
        lse = can(call, engine)
        assume(can(call, engine, lse))
        for ours, theirs in zip(results(call, engine, lse), results(call, "reference", lse), strict=True):
            if ours is not None and theirs is not None:
                assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("engine", OTHERS)
@settings(max_examples=100)
@given(call=calls(longest=24))
def test_gradients_equal_the_reference_in_float64(engine: str, call: Call) -> None:
    lse = can(call, engine)
    assume(can(call, engine, lse))
    assert_close_gradients(everything(call, engine, lse)[2:], everything(call, "reference", lse)[2:])


@pytest.mark.parametrize("engine", ["reference", "tiled", "native"])
@settings(max_examples=150)
@given(call=calls(longest=24, normalized=True))
def test_other_normalizations_equal_the_definition_in_float64(engine: str, call: Call) -> None:
    assume(can(call, engine, lse=False))
    read = Reader()
    inputs = [read.leaf(t) for t in call.tensors()]
    exact = dense(*inputs, call.description, read)
    ours = everything(call, engine, lse=False)
    scale = 1 + exact.output.detach().abs().max()
    assert_close(ours[0] / scale, exact.output.detach() / scale, 1e-12)
    generator = torch.Generator().manual_seed(0)
    loss = (exact.output * torch.randn(exact.output.shape, generator=generator, dtype=torch.float64)).sum()
    leaves = [*inputs, *map(read.leaf, call.learned)]
    for mine, theirs in zip(ours[2:], torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
        if theirs is not None:
            mine = torch.zeros_like(theirs) if mine is None else mine
            size = 1 + theirs.abs().max()
            assert_close(mine.reshape(theirs.shape) / size, theirs / size, 1e-9)
