"""Regression tests for silent errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    return query, key, value


def dense(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Attention in float64, in plain torch."""
    logits = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return logits.masked_fill(~allowed, -math.inf).softmax(-1) @ value.double()


def test_every_description_has_a_score_of_its_own() -> None:
    first, second = rg.Attention(), rg.Attention()
    changed, other = rg.Modified(lambda score, b, h, p, j: score), rg.Modified(lambda score, b, h, p, j: score)
    assert first.score is not second.score
    assert changed.score is not other.score
    first.score.register_forward_hook(lambda *_: None)
    assert not second.score._forward_hooks
    assert repr(first) == "Attention()"


@pytest.mark.parametrize("score", [rg.Dot, rg.Cosine])
@pytest.mark.parametrize("scale", [torch.tensor([1, 2, 3, 4]), torch.tensor([1 + 2j])])
def test_a_scale_that_is_not_floating_point_is_refused(score: Callable, scale: Tensor) -> None:
    with pytest.raises(TypeError, match="floating-point"):
        score(scale=scale)


def test_a_changed_attribute_of_a_mask_function_is_seen() -> None:
    def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return (j < rule.limit) & (p >= 0)  # type: ignore[attr-defined]

    attend, (query, key, value) = rg.Attention(mask=rg.where(rule)), inputs()
    for limit in (2, 5):
        rule.limit = limit  # type: ignore[attr-defined]
        expected = dense(query, key, value, torch.arange(6) < limit)
        torch.testing.assert_close(attend(query, key, value), expected.float())


def test_a_query_of_nan_gives_nan_on_sdpa() -> None:
    query, key, value = inputs()
    query[0, 0, 3, 2] = math.nan
    found = rg.attention(query, key, value, engine="sdpa")
    assert found[0, 0, 3].isnan().all()
    assert found.isnan().sum() == 8


def test_a_masked_key_whose_product_overflows_reaches_nothing_on_sdpa() -> None:
    query, key, value = inputs()
    key[:, :, 5] = value[:, :, 5] = 1e38
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = rg.attention(query, key, value, mask=rg.padding([5, 5]), engine="sdpa")
    expected = dense(query[:, :, :], key[:, :, :5], value[:, :, :5], torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(found, expected.float())
    for grad, wanted in zip(
        torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sparse_tensor_is_refused_by_a_remembered_plan(place: int) -> None:
    attend, tensors = rg.Attention(), list(inputs())
    attend(*tensors)
    tensors[place] = tensors[place].to_sparse()
    with pytest.raises(TypeError, match="layout"):
        attend(*tensors)


def test_tensors_on_meta_give_shapes_or_a_clear_error() -> None:
    query = torch.empty(2, 4, 6, 8, device="meta")
    attend = rg.Attention(mask=rg.causal(), sink=1.0)
    assert attend(query, query, query).shape == (2, 4, 6, 8)
    assert attend.weights(query, query).shape == (2, 4, 6, 6)
    with pytest.raises(ValueError, match="meta"):
        attend.statistics(query, query)


NESTED = {
    "strided": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)]),
    "jagged": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)], layout=torch.jagged),
}
HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "sink": lambda x: rg.Attention(sink=x),
    "bias": lambda x: rg.Attention(bias=x),
    "dense_bias": rg.dense_bias,
    "relative": rg.relative,
    "t5": rg.t5,
    "shaw": rg.shaw,
    "Dot": lambda x: rg.Dot(scale=x),
    "Cosine": lambda x: rg.Cosine(scale=x),
    "Additive": rg.Additive,
    "Bilinear": rg.Bilinear,
    "offset": lambda x: rg.Attention(offset=x),
    "mask": lambda x: rg.Attention(mask=x),
    "padding": rg.padding,
    "documents": rg.documents,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.parametrize("holder", HOLDERS)
def test_nested_tensors_are_refused_wherever_a_tensor_may_be_given(holder: str, layout: str) -> None:
    with pytest.raises(TypeError, match="nested"):
        HOLDERS[holder](NESTED[layout])


@pytest.mark.parametrize("use", ["call", "weights", "whole", "functional_call"])
def test_an_offset_that_vmap_maps_over_is_refused(use: str) -> None:
    query, key, value = inputs()

    def attend(offset: Tensor) -> Tensor:
        if use == "functional_call":
            held = rg.Attention(mask=rg.causal(), offset=torch.tensor([0, 1]))
            return torch.func.functional_call(held, {"offset": offset.expand(2)}, (query, key, value))
        made = rg.Attention(mask=rg.causal(), offset=offset if use == "whole" else offset.expand(2))
        return made.weights(query, key) if use == "weights" else made(query, key, value)

    with pytest.raises(NotImplementedError, match="offset is read as values"):
        torch.func.vmap(attend)(torch.arange(3))
