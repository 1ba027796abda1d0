"""Expected features of torch: autograd, compile, autocast, vmap, any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard as rg
import regard.engines.tiled


def normal(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard.engines.tiled, "tile_size", lambda problem: (4, 4))


LEARNED = {
    "dot with a learned scale, a learned table and a sink": lambda w: {
        "score": rg.Dot(scale=w[0]),
        "bias": rg.relative(w[1]),
        "sink": w[0],
        "mask": rg.causal(),
    },
    "additive": lambda w: {"score": rg.Additive(w[2])},
    "shaw with values": lambda w: {"bias": rg.shaw(w[3], w[3]), "mask": rg.window(2, 1)},
    "a dense bias": lambda w: {"bias": w[4], "temperature": 0.5},
    "a modifier that closes over a parameter": lambda w: {"score": lambda s, b, h, p, j: s * w[0][h].exp()},
}


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("engine", ["reference", "tiled"])
@pytest.mark.parametrize("name", LEARNED)
def test_first_and_second_derivatives_are_right(engine: str, name: str) -> None:
    q, k, v = normal(1, 2, 5, 3, grad=True), normal(1, 1, 6, 3, grad=True), normal(1, 1, 6, 3, grad=True)
    learned = [normal(2, grad=True), normal(5, 2, grad=True), normal(3, grad=True), normal(3, 3, grad=True)]
    learned.append(normal(5, 6, grad=True))

    def call(q: Tensor, k: Tensor, v: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(q, k, v, engine=engine, return_lse=True, **LEARNED[name](w))

    assert gradcheck(call, (q, k, v, *learned))
    assert gradgradcheck(call, (q, k, v, *learned), check_undefined_grad=False, fast_mode=True)


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
