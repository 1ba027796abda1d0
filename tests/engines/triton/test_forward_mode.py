"""Tangents by the kernels for GPUs, in Triton's interpreter, compared with those of the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import regard as rg
from regard.engines import triton
from regard.engines.triton import operator
from tests.engines.calls import normal

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)
B, H, G, Q, K, D, E = 2, 2, 1, 37, 70, 6, 5
Describe = Callable[..., dict[str, Any]]
SOME = rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h + b) % 5 < 2)
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Describe]] = {
    "plain": ((), dict),
    "causal and cap": ((), lambda: {"mask": rg.causal(), "score": rg.Dot(softcap=2.0)}),
    "tiles and temperature": ((), lambda: {"mask": SOME, "temperature": 0.7}),
    "sink": (((H,),), lambda sink: {"mask": rg.window(9, 0), "sink": sink}),
    "dropout": ((), lambda: {"mask": rg.causal(), "dropout": 0.4}),
    "distances": (((15, H),), lambda table: {"bias": rg.relative(table), "mask": SOME}),
    "dense bias": (((1, H, Q, K),), lambda dense: {"bias": rg.dense_bias(dense), "mask": rg.causal()}),
    "bias for keys": (((1, 1, 1, K),), lambda dense: {"bias": rg.dense_bias(dense)}),
    "shaw": (((5, D), (5, E)), lambda keys, values: {"bias": rg.shaw(keys, values), "mask": SOME, "dropout": 0.3}),
    "shaw of one distance": (((1, D), (1, E)), lambda keys, values: {"bias": rg.shaw(keys, values)}),
    "cosine": (((H,),), lambda scale: {"score": rg.Cosine(scale=scale)}),
    "bilinear": (((D, D),), lambda matrix: {"score": rg.Bilinear(matrix)}),
    "additive": (((H, D),), lambda weight: {"score": rg.Additive(weight), "mask": rg.window(30, 9)}),
}
GIVEN = ((B, H, Q, D), (B, G, K, D), (B, G, K, E))


def tangents(
    engine: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], describe: Describe, moved: tuple[bool, ...]
) -> list[Tensor | None]:
    primals = [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(x, normal(*x.shape, seed=50 + n, dtype=dtype)) if moved[n] else x
            for n, x in enumerate(primals)
        ]
        torch.manual_seed(4)
        results = rg.attention(*given[:3], engine=engine, return_lse=True, **describe(*given[3:]))
        pairs = [forward_ad.unpack_dual(result) for result in results]
        return [part for pair in pairs for part in pair]


@pytest.mark.parametrize("name", CASES)
def test_tangents_of_every_feature(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = operator.jvp
    monkeypatch.setattr(operator, "jvp", lambda *given: calls.append(1) or kernel(*given))
    shapes, describe = GIVEN + CASES[name][0], CASES[name][1]
    moved = (True,) * len(shapes)
    ours = tangents("triton", torch.float32, shapes, describe, moved)
    exact = tangents("reference", torch.float64, shapes, describe, moved)
    assert calls, "the kernel was not used"
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4, check_dtype=False)


@pytest.mark.parametrize("chosen", range(3))
def test_a_tangent_of_one_tensor_alone(chosen: int) -> None:
    moved = tuple(n == chosen for n in range(3))
    describe = CASES["causal and cap"][1]
    ours = tangents("triton", torch.float32, GIVEN, describe, moved)
    exact = tangents("reference", torch.float64, GIVEN, describe, moved)
    for one, other in zip(ours, exact, strict=True):
        other = torch.zeros_like(ours[2]) if other is None else other
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tangents_in_sixteen_bits(dtype: torch.dtype) -> None:
    describe = CASES["causal and cap"][1]
    ours = tangents("triton", dtype, GIVEN, describe, (True,) * 3)
    rounded = tangents("reference", dtype, GIVEN, describe, (True,) * 3)
    exact = tangents("reference", torch.float64, GIVEN, describe, (True,) * 3)
    for one, torchs, other in zip(ours, rounded, exact, strict=True):
        assert one is not None
        assert torchs is not None
        assert other is not None
        assert one.dtype == torchs.dtype
        # both engines start from rounded numbers: their distance is what the kernel adds
        difference = (one.double() - torchs.double()).abs().max()
        assert difference <= 8 * torch.finfo(dtype).eps * other.abs().max()


def test_masked_numbers_that_are_not_finite_reach_no_tangent() -> None:
    mask = rg.padding([40])
    query, key, value = normal(1, H, Q, D, seed=1), normal(1, G, K, D, seed=2), normal(1, G, K, E, seed=3)
    query, key, value = query.float(), key.float(), value.float()
    moves = [x.cos() for x in (query, key, value)]

    def along(*given: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(lambda *x: rg.attention(*x, mask=mask, engine="triton"), given, tuple(moves))

    clean = along(query, key, value)
    key[:, :, 45], value[:, :, 50], moves[1][:, :, 41], moves[2][:, :, 60] = (float("nan"), float("inf")) * 2
    for one, other in zip(clean, along(query, key, value), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_rows_that_see_nothing_have_no_tangent() -> None:
    given = tuple(normal(1, 1, 5, 4, seed=n, dtype=torch.float32) for n in range(3))
    attend = rg.Attention(mask=rg.padding([0]), sink=None)
    _, moved = torch.func.jvp(lambda *x: attend(*x, engine="triton"), given, given)
    assert (moved == 0).all()
