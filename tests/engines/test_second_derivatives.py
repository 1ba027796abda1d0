"""Second derivatives by tiles: equal to those of the definition, in memory that grows with Q + K."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from torch.autograd import forward_ad

import regard as rg
from regard.engines import tiled
from regard.engines.select import ENGINES
from tests.engines.calls import normal
from tests.engines.test_memory import megabytes
from tests.strategies import Call, calls


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1)


def like(tensors: list[Tensor], seed: int) -> list[Tensor]:
    return [normal(*x.shape, seed=seed + n) for n, x in enumerate(tensors)]


def twice(tensors: list[Tensor], engine: str, description: dict[str, Any]) -> list[Tensor]:
    """The gradients of a function of the gradients."""
    output = rg.attention(*tensors[:3], engine=engine, **description)
    (by,) = like([output], 50)
    by.requires_grad_()
    grads = torch.autograd.grad(output, tensors, by, create_graph=True, materialize_grads=True)
    loss = sum((x * weight).sum() for x, weight in zip(grads, like(list(grads), 60), strict=True))
    return list(torch.autograd.grad(loss, [*tensors, by], materialize_grads=True))


def over_jvp(tensors: list[Tensor], engine: str, description: dict[str, Any]) -> list[Tensor]:
    """The gradients of a loss that contains output and tangent."""
    tangents = [x.requires_grad_() for x in like(tensors[:3], 70)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=False)]
        output = rg.attention(*duals, engine=engine, **description)
        primal, tangent = forward_ad.unpack_dual(output)
        loss = (primal * normal(*primal.shape, seed=80)).sum() + (tangent * normal(*tangent.shape, seed=81)).sum()
    return list(torch.autograd.grad(loss, [*tensors, *tangents], materialize_grads=True))


@pytest.mark.parametrize(
    ("engine", "function"),
    [("native", twice), ("native", over_jvp), ("tiled", twice), ("tiled", over_jvp), ("sdpa", twice)],
)
@given(call=calls())
@settings(max_examples=40, deadline=None)
def test_second_derivatives_equal_those_of_the_reference(engine: str, function: Any, call: Call) -> None:
    assume(call.query.numel() and call.key.shape[2])
    atol = 1e-10
    if "Cosine" in repr(call.description.get("score")):
        shortest = min(float(x.norm(dim=-1).min()) for x in (call.query, call.key))
        assume(shortest > 1e-4)
        atol += cosine_error(shortest)
    tensors = [x.detach().clone().requires_grad_() for x in (call.query, call.key, call.value)]
    assume(not ENGINES[engine].why_not(rg.Attention(**call.description).problem(*tensors)))
    tensors += [x.requires_grad_() for x in call.learned if x.is_leaf]
    actual, expected = (function(tensors, name, call.description) for name in (engine, "reference"))
    assert all(x.isfinite().all() for x in expected)
    for one, other in zip(actual, expected, strict=True):
        scale = 1 + other.abs().amax() if other.numel() else 1
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=atol)


def cosine_error(length: float) -> float:
    """Rounding errors of second derivatives by a vector of a cosine: each derivative divides them by its length.

    The gradient is `(g - n (n · g)) / l`, see docs/inside/rounding.md. Where g and n (n · g) cancel, its error is not
    relative to it. The sums have up to 1,000 terms.
    """
    return 1000 * 2**-53 / min(length, 1.0) ** 2


@pytest.mark.parametrize("length", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize(("engine", "function"), [("native", twice), ("native", over_jvp), ("tiled", twice)])
def test_a_short_vector_of_one_component_has_no_gradient_beyond_rounding(
    engine: str, function: Any, length: float
) -> None:
    query, key = (normal(1, 2, n, 1, seed=n).sign() * length for n in (7, 9))
    tensors = [x.requires_grad_() for x in (query, key, normal(1, 2, 9, 4))]
    by_query, by_key, *_ = function(tensors, engine, {"score": rg.Cosine(scale=4.0)})
    assert max(x.abs().max() for x in (by_query, by_key)) < cosine_error(length)


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa", "reference"])
def test_expanded_tensors_have_second_derivatives(engine: str) -> None:
    tensors = [
        normal(2, 2, 5, 4),
        *(normal(*shape, seed=9).expand(2, 2, 5, 4) for shape in [(1, 2, 5, 4), (2, 2, 1, 4)]),
    ]
    tensors = [x.requires_grad_() for x in tensors]
    query, key, value = tensors
    expected = second_gradients(torch.softmax(query @ key.mT / 2, -1) @ value, tensors)
    actual = second_gradients(rg.attention(query, key, value, engine=engine), tensors)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def second_gradients(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(output, tensors, normal(*output.shape, seed=50), create_graph=True)
    return list(torch.autograd.grad(grads, tensors, like(tensors, 60)))


@pytest.mark.parametrize("engine", ["native", "tiled", "sdpa"])
def test_what_is_not_finite_and_masked_has_no_part(engine: str) -> None:
    query, key, value = normal(2, 2, 5, 4), normal(2, 2, 40, 4, seed=1), normal(2, 2, 40, 4, seed=2)
    whole = [x.requires_grad_() for x in (query, key[:, :, :30].clone(), value[:, :, :30].clone())]
    key[:, :, 30:], value[:, :, 30:] = torch.nan, torch.inf
    padded = [query, key.requires_grad_(), value.requires_grad_()]
    expected = twice(whole, "reference", {})
    output = rg.attention(*padded, engine=engine, mask=rg.padding([30, 30]))
    by = normal(*output.shape, seed=50).requires_grad_()
    grads = torch.autograd.grad(output, padded, by, create_graph=True)
    weights = like(whole, 60)
    loss = sum((x[:, :, : w.shape[2]] * w).sum() for x, w in zip(grads, weights, strict=True)) + grads[1].sum() * 0
    for one, other in zip(torch.autograd.grad(loss, [*padded, by]), expected, strict=True):
        torch.testing.assert_close(one[:, :, : other.shape[2]], other)
        assert not one[:, :, other.shape[2] :].any()


@pytest.mark.parametrize("form", ["twice", "over a jvp"])
def test_second_derivatives_of_4096_tokens_take_under_60_megabytes(form: str) -> None:
    used = megabytes(
        f"""
        from torch.autograd import forward_ad
        attend = rg.Attention(mask=rg.causal())
        def gradients(tokens):
            q, k, v = (torch.randn(1, 1, tokens, 32, requires_grad=True) for _ in range(3))
            if {form == "twice"}:
                grads = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)
                loss = sum(grad.square().sum() for grad in grads)
            else:
                with forward_ad.dual_level():
                    output = attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
                    loss = forward_ad.unpack_dual(output).tangent.square().sum()
            torch.autograd.grad(loss, (q, k, v))
        gradients(64)
        with Peak():
            gradients(4096)
        """
    )
    assert used < 60
