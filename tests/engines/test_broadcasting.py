"""A batch of one broadcasts."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.attention import OBSERVERS
from tests.engines.test_inputs import nan_in_new_memory, normal  # noqa: F401


@pytest.mark.parametrize("engine", ["native", "sdpa", "reference", "tiled", None])
@pytest.mark.parametrize("shared", [("query",), ("key",), ("value",), ("key", "value"), ("query", "value")], ids=str)
def test_a_batch_of_one_broadcasts(shared: tuple[str, ...], engine: str | None) -> None:
    x = {name: normal(1 if name in shared else 3, 4 if name == "query" else 2, 9, 8, seed=len(name)) for name in
         ("query", "key", "value")}  # fmt: skip
    given = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    wide = {name: tensor.expand(3, -1, -1, -1).clone().requires_grad_() for name, tensor in x.items()}
    lengths = torch.tensor([9, 4, 1])
    description = {"mask": rg.padding(lengths)} if engine != "sdpa" else {}
    output = rg.attention(**given, engine=engine, **description)
    key, value = (wide[name].repeat_interleave(2, 1) for name in ("key", "value"))
    logits = wide["query"] @ key.mT / 8**0.5
    if description:
        logits = logits.masked_fill(torch.arange(9) >= lengths[:, None, None, None], -torch.inf)
    expected = logits.softmax(-1) @ value
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    grad = normal(*expected.shape, seed=7)
    ours = torch.autograd.grad(output, [*given.values()], grad)
    theirs = torch.autograd.grad(expected, [*wide.values()], grad)
    for name, one, other in zip(given, ours, theirs, strict=True):
        assert one.shape == x[name].shape
        torch.testing.assert_close(one, other.sum_to_size(one.shape), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", ["query", "key"])
def test_inspection_broadcasts_a_batch_of_one(shared: str) -> None:
    x = {name: normal(1 if name == shared else 3, 2, 70, 8, seed=len(name)) for name in ("query", "key")}
    wide = {name: tensor.expand(3, -1, -1, -1).contiguous() for name, tensor in x.items()}
    bias, offset = normal(3, 1, 70, 70), [0, 1, -2]
    attend = rg.Attention(mask=rg.causal(), bias=bias, offset=offset)
    for call in (
        lambda **tensors: attend.weights(**tensors),
        lambda **tensors: attend.weights(**tensors, rows=[3], heads=[1]),
        lambda **tensors: attend.map(**tensors, size=(5, 6)),
        lambda **tensors: attend.statistics(**tensors, mass_on=[0]).mass,
        lambda **tensors: attend.statistics(**tensors).entropy,
    ):
        output = call(**x)
        assert output.shape[0] == 3
        torch.testing.assert_close(output, call(**wide), rtol=0, atol=0)
    explained = attend.explain(x["query"], x["key"], x["key"])
    assert explained.sizes["B"] == 3
    seen: list[tuple[int, int, int]] = []
    token = OBSERVERS.set((lambda _, query, key, value: seen.append((len(query), len(key), len(value))),))
    attend(x["query"], x["key"], x["key"])
    OBSERVERS.reset(token)
    assert seen == [(3, 3, 3)]


def test_linear_attention_broadcasts_a_batch_of_one() -> None:
    q, k, v = normal(3, 2, 9, 8), normal(1, 2, 9, 8, seed=1).requires_grad_(), normal(3, 2, 9, 8, seed=2)
    linear = rg.LinearAttention(mask=rg.causal())
    output, expected = linear(q, k, v), linear(q, k.repeat(3, 1, 1, 1), v)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each.square().sum(), k)[0] for each in (output, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert linear.step(q, k, v)[0].shape == (3, 2, 9, 8)


@pytest.mark.parametrize("batches", [(0, 1, 1), (1, 0, 0)])
def test_an_empty_batch_broadcasts(batches: tuple[int, int, int]) -> None:
    q, k, v = (torch.zeros(n, 2, 5, 8) for n in batches)
    assert rg.attention(q, k, v).shape == (0, 2, 5, 8)
