"""The tiled engine: its tiles, and derivatives over many small tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard as rg
from regard.engines import tiled
from regard.engines.problem import Problem
from tests.engines.calls import inputs
from tests.engines.calls import tensors as random_tensors


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "tile_size", lambda problem: (4, 4))


def problem(mask: rg.Mask | None = None, Q: int = 11, K: int = 14, **description: object) -> Problem:
    query, key, value = inputs(Q=Q, K=K)
    return rg.Attention(mask=mask, **description).problem(query, key, value)  # type: ignore[arg-type]


MASKS = {
    "none": None,
    "causal": rg.causal(),
    "window": rg.window(2, 1),
    "per batch row": rg.padding([5, 14]),
    "per head": rg.where(lambda b, h, p, j: (p + j) % (h + 2) == 0),
    "no visible key": rg.padding([0, 0]),
}


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("name", MASKS)
def test_tiles_cover_every_visible_entry_once(name: str) -> None:
    call = problem(MASKS[name])
    covered = torch.zeros(2, 4, 11, 14, dtype=torch.int64)
    full = torch.zeros_like(covered, dtype=torch.bool)
    for row in tiled.tile_rows(call):
        for columns, is_full in row.columns:
            covered[(*row.box, columns)] += 1
            full[(*row.box, columns)] = is_full
    mask = MASKS[name]
    allowed = torch.ones_like(full) if mask is None else mask.allows(call.frame.indices()).expand_as(full)
    assert covered.max() <= 1
    assert (covered[allowed] == 1).all()
    assert allowed[full].all()


def test_tiles_shrink_with_batch_heads_and_width_of_the_additive_score() -> None:
    assert tiled.tile_size(problem()) == (256, 512)
    many = rg.Attention().problem(*torch.zeros(3, 64, 8, 2, 4, device="meta"))
    additive = rg.Attention(score=rg.Additive(torch.zeros(4, device="meta"))).problem(
        *torch.zeros(3, 64, 8, 2, 4, device="meta")
    )
    rows, columns = tiled.tile_size(many)
    assert 64 * 8 * rows * columns <= tiled.TILE_ELEMENTS
    fewer_rows, fewer_columns = tiled.tile_size(additive)
    assert fewer_rows * fewer_columns < rows * columns


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("name", MASKS)
def test_many_tiles_are_merged_exactly(name: str) -> None:
    tensors = inputs(Q=11, K=14)
    ours, expected = (
        rg.attention(*tensors, mask=MASKS[name], sink=0.2, engine=engine, return_lse=True)
        for engine in ("tiled", "reference")
    )
    for result, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-12, atol=1e-12)


def test_a_score_that_differs_in_the_backward_pass_raises() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    factors = iter((1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0))
    output = rg.attention(query, key, value, score=lambda s, b, h, p, j: s * next(factors), engine="tiled")
    with pytest.raises(RuntimeError, match="different values in the backward pass"):
        output.sum().backward()


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
    q, k, v, *learned = random_tensors(
        (1, 2, 5, 3), (1, 1, 6, 3), (1, 1, 6, 3), (2,), (5, 2), (3,), (3, 3), (5, 6)
    )  # fmt: skip

    def call(q: Tensor, k: Tensor, v: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        return rg.attention(q, k, v, engine=engine, return_lse=True, **LEARNED[name](w))

    assert gradcheck(call, (q, k, v, *learned))
    assert gradgradcheck(call, (q, k, v, *learned), check_undefined_grad=False, fast_mode=True)


def test_gradients_of_several_tiles_are_rounded_once() -> None:
    """Gradients of all tiles are summed in float32, for sixteen-bit inputs and tensors of the description alike."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.bfloat16, requires_grad=True) for n in (1500, 40, 40))
    table = torch.randn(65, 2, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.rand(2, requires_grad=True)
    inputs = (q, k, v, table, slope)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, slope: Tensor, engine: str) -> tuple[Tensor, ...]:
        def wave(s: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
            return s.sin() * slope[h]

        output = rg.attention(q, k, v, score=wave, bias=rg.relative(table), offset=0, engine=engine)
        return torch.autograd.grad(output, (q, k, v, table), torch.ones_like(output) * signs)

    signs = torch.randn(1500, 1).sign().bfloat16()
    exact = run(*(x.detach().double().requires_grad_() for x in inputs), "reference")
    for ours, expected in zip(run(*inputs, "tiled"), exact, strict=True):
        error = (ours.double() - expected).abs()
        assert bool((error <= 2**-8 * expected.abs() + 2e-5).all())
