"""The call, as torch users expect it: autograd, compile, autocast, vmap, strides, meta and nested tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg


def normal(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("engine", ["reference", "tiled", "sdpa", "native"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_any_subset_of_the_inputs_may_require_grad(engine: str, wanted: tuple[int, ...]) -> None:
    inputs = [normal(1, 2, 9, 4) for _ in range(3)]
    whole = [t.clone().requires_grad_() for t in inputs]
    part = [t.clone().requires_grad_(n in wanted) for n, t in enumerate(inputs)]
    rg.attention(*whole, mask=rg.causal(), engine="reference").sin().sum().backward()
    rg.attention(*part, mask=rg.causal(), engine=engine).sin().sum().backward()
    for n in range(3):
        if n in wanted:
            torch.testing.assert_close(part[n].grad, whole[n].grad)
        else:
            assert part[n].grad is None


DESCRIPTIONS = {
    "plain": {},
    "causal": {"mask": rg.causal()},
    "window and alibi": {"mask": rg.causal() & rg.window(3, 0), "bias": rg.alibi(2)},
    "padding and sink": {"mask": rg.padding([5]), "sink": 0.3},
    "random blocks": {"mask": rg.bigbird(2)},
    "documents": {"mask": rg.documents([0, 0, 0, 1, 1, 1, 2, 2, 2])},
    "edges": {"mask": rg.edges(torch.tensor([[0, 1, 5], [3, 1, 8]]))},
    "cosine": {"score": rg.Cosine(scale=4.0)},
    "softcap": {"score": rg.Dot(softcap=3.0)},
    "modifier": {"score": lambda s, b, h, p, j: s - (p - j).abs()},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_compiles_as_one_graph_forward_and_backward(name: str) -> None:
    torch._dynamo.reset()
    description = DESCRIPTIONS[name]
    inputs = [normal(1, 2, 9, 4, grad=True, dtype=torch.float32) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: rg.attention(q, k, v, **description), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    ours = compiled(*inputs)
    torch.manual_seed(1)
    eager = rg.attention(*inputs, engine="reference", **description)
    torch.testing.assert_close(ours, eager)
    for a, b in zip(
        torch.autograd.grad(ours.sin().sum(), inputs), torch.autograd.grad(eager.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_inductor_compiles_it_too() -> None:
    torch._dynamo.reset()
    inputs = [normal(1, 2, 33, 8, grad=True, dtype=torch.float32) for _ in range(3)]
    attend = rg.Attention(mask=rg.causal() & rg.window(7, 0), bias=rg.alibi(2))
    ours, eager = torch.compile(attend, fullgraph=True)(*inputs), attend(*inputs, engine="reference")
    torch.testing.assert_close(ours, eager)
    for a, b in zip(
        torch.autograd.grad(ours.sin().sum(), inputs), torch.autograd.grad(eager.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_lengths_may_be_made_inside_a_compiled_function() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.padding(lengths))

    inputs, lengths = [normal(2, 2, 9, 4) for _ in range(3)], torch.tensor([4, 7])
    ours = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs, lengths)
    torch.testing.assert_close(ours, call(*inputs, lengths))


@pytest.mark.parametrize("description", [{}, {"mask": rg.causal()}, {"mask": rg.window(2, 2), "bias": rg.alibi(2)}])
def test_vmap_over_a_leading_axis_equals_a_loop(description: dict) -> None:
    q, k, v = (normal(3, 1, 2, 7, 4) for _ in range(3))
    mapped = torch.func.vmap(lambda q, k, v: rg.attention(q, k, v, **description))(q, k, v)
    looped = torch.stack([rg.attention(*one, **description) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(mapped, looped)


def test_vmap_of_grad_works() -> None:
    q, k, v = (normal(3, 1, 2, 7, 4) for _ in range(3))
    loss = lambda q, k, v: rg.attention(q, k, v, mask=rg.causal()).sin().sum()  # noqa: E731
    mapped = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    q.requires_grad_()
    (looped,) = torch.autograd.grad(sum(loss(*one) for one in zip(q, k, v, strict=True)), q)
    torch.testing.assert_close(mapped, looped)


@pytest.mark.parametrize("engine", [None, "reference", "tiled"])
def test_autocast_computes_in_its_dtype_and_keeps_float32_sums(engine: str | None) -> None:
    q, k, v = (normal(1, 2, 64, 16, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, lse = rg.attention(q, k.bfloat16(), v, engine=engine, return_lse=True)
    assert mixed.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    plain = rg.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), engine="reference")
    torch.testing.assert_close(mixed, plain, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("engine", ["reference", "tiled", "sdpa", "native"])
def test_strides_do_not_matter(engine: str) -> None:
    q = normal(2, 9, 4, 6).transpose(1, 2)  # (B, N, H, D) as projections give it
    k = normal(1, 4, 9, 6).expand(2, 4, 9, 6)
    v = normal(2, 4, 6, 18)[..., ::2].transpose(2, 3)
    ours = rg.attention(q, k, v, mask=rg.causal(), engine=engine)
    plain = rg.attention(q.contiguous(), k.contiguous(), v.contiguous(), mask=rg.causal(), engine="reference")
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("engine", ["tiled", "sdpa", "native"])
def test_same_inputs_give_the_same_bits(engine: str) -> None:
    inputs = [normal(1, 2, 130, 16, grad=True, dtype=torch.float32) for _ in range(3)]
    first, second = (
        torch.autograd.grad(rg.attention(*inputs, mask=rg.causal(), engine=engine).sin().sum(), inputs)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def seeded_inputs() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    return query, key, value


def dense(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Attention in float64, in plain torch."""
    logits = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return logits.masked_fill(~allowed, -math.inf).softmax(-1) @ value.double()


def test_a_changed_attribute_of_a_mask_function_is_seen() -> None:
    def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return (j < rule.limit) & (p >= 0)  # type: ignore[attr-defined]

    attend, (query, key, value) = rg.Attention(mask=rg.where(rule)), seeded_inputs()
    for limit in (2, 5):
        rule.limit = limit  # type: ignore[attr-defined]
        expected = dense(query, key, value, torch.arange(6) < limit)
        torch.testing.assert_close(attend(query, key, value), expected.float())


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


@pytest.mark.parametrize("give", [list, tuple, torch.tensor])
def test_an_offset_per_row_within_transforms(give: Callable[[list[int]], Any]) -> None:
    query, key, value = (x.double() for x in seeded_inputs())
    offset = give([1, 0])

    def attend(query: Tensor, offset: Any) -> Tensor:
        description = rg.Attention(mask=rg.causal(), bias=rg.alibi(query.shape[-3]), offset=offset)
        return description.replace(temperature=0.7)(query, key, value)

    def expected(query: Tensor) -> Tensor:
        rows = zip(query, key, value, (1, 0), strict=True)
        return torch.stack([attend_row(*row) for row in rows])

    def attend_row(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None] - offset
        slopes = 2 ** (-8 / len(q) * torch.arange(1, len(q) + 1))[:, None, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5 - slopes * distance.abs()) / 0.7
        weights = scores.masked_fill(distance > 0, -torch.inf).softmax(-1).nan_to_num(0.0)
        return weights @ v

    gradient = torch.func.grad(lambda x: attend(x, offset).sin().sum())(query)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: expected(x).sin().sum())(query))
    tangent = torch.func.jvp(lambda x: attend(x, offset), (query,), (query,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(expected, (query,), (query,))[1])


@pytest.mark.parametrize("use", ["call", "weights", "whole", "functional_call"])
def test_an_offset_that_vmap_maps_over_is_refused(use: str) -> None:
    query, key, value = seeded_inputs()

    def attend(offset: Tensor) -> Tensor:
        if use == "functional_call":
            held = rg.Attention(mask=rg.causal(), offset=torch.tensor([0, 1]))
            return torch.func.functional_call(held, {"offset": offset.expand(2)}, (query, key, value))
        attend = rg.Attention(mask=rg.causal(), offset=offset if use == "whole" else offset.expand(2))
        return attend.weights(query, key) if use == "weights" else attend(query, key, value)

    with pytest.raises(NotImplementedError, match="offset is read as values"):
        torch.func.vmap(attend)(torch.arange(3))
