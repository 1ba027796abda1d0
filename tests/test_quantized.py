"""Keys and values in fewer bytes: the results are those of the dequantized numbers, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import regard as rg
from regard.engines import native
from regard.nn import Cache, FixedCache, WindowCache
from tests.bounds import judge
from tests.hostile import within

DTYPES = [torch.bfloat16, torch.float16, torch.int8]
# A scale is one more rounding of a key, (D + 5) u instead of (D + 4) u, and of a value: at most a fourth more.
SCALE = 1.25

DESCRIPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": rg.causal()},
    {"mask": rg.window(5, 2), "sink": 0.5},
    {"mask": ~rg.window(3, 3), "score": rg.Dot(softcap=3.0)},
    {"bias": rg.alibi(4), "mask": rg.causal()},
    {"score": rg.Dot(scale=torch.tensor([0.1, 0.2, 0.3, 0.4])), "temperature": 0.7},
    {"score": rg.Cosine(scale=4.0)},
]


def tensors(Q: int, K: int, D: int, G: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(2, h, n, D, generator=generator).to(dtype) for h, n in ((4, Q), (G, K), (G, K))
    )  # fmt: skip
    return query, key, value


def quantize(key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[rg.QuantizedTensor, rg.QuantizedTensor]:
    return rg.QuantizedTensor.quantize(key, dtype), rg.QuantizedTensor.quantize(value, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30)
@given(
    Q=st.sampled_from([1, 2, 3, 7, 20, 33]), K=st.integers(1, 150), D=st.sampled_from([1, 8, 15, 33, 64]),
    G=st.sampled_from([1, 2, 4]), description=st.sampled_from(DESCRIPTIONS), seed=st.integers(0, 9),
)  # fmt: skip
def test_results_are_those_of_the_dequantized_numbers(
    dtype: torch.dtype, Q: int, K: int, D: int, G: int, description: dict[str, Any], seed: int
) -> None:
    query, key, value = tensors(Q, K, D, G, torch.float32, seed)
    key, value = quantize(key, value, dtype)
    output, lse = rg.attention(query, key, value, return_lse=True, **description)
    exact = [query.double(), key.dequantize(torch.float64), value.dequantize(torch.float64)]
    judged = judge(exact, description, [], torch.float32)
    within("output", output, judged.output, SCALE * judged.output_bound)
    within("lse", lse, judged.lse, SCALE * judged.lse_bound)


@pytest.mark.skipif(bool(native.why_missing()), reason="reads of the kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_read_the_stored_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(2, 40, 16, 2, torch.float32, 0)
    monkeypatch.setattr(rg.QuantizedTensor, "dequantize", None)
    key, value = quantize(key, value, dtype)
    assert rg.attention(query, key, value, mask=rg.causal()).shape == query.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planted", [torch.nan, torch.inf])
@pytest.mark.parametrize("Q", [2, 40])
def test_a_token_that_is_not_finite_reaches_only_queries_that_see_it(
    dtype: torch.dtype, planted: float, Q: int
) -> None:
    for place in range(2):
        query, *clean = tensors(Q, 50, 16, 2, torch.float32, 1)
        spoiled = [t.clone() for t in clean]
        spoiled[place][:, :, 30, 3] = planted
        expected, actual = (
            rg.attention(query, *quantize(*t, dtype), mask=rg.causal(), offset=0 if Q == 40 else 10)
            for t in (clean, spoiled)
        )
        last = 30 if Q == 40 else Q
        torch.testing.assert_close(actual[:, :, :last], expected[:, :, :last], rtol=0, atol=0)
        assert not actual[:, :, last:].isfinite().all(-1).any()


def test_int8_tokens_that_are_not_finite_are_nan_and_tokens_of_zeros_are_zero() -> None:
    x = torch.randn(1, 1, 4, 8)
    x[0, 0, 1, 2], x[0, 0, 2], x[0, 0, 3] = torch.inf, 0.0, 1e-40
    back = rg.QuantizedTensor.quantize(x, torch.int8).dequantize()
    assert back[0, 0, 1].isnan().all()
    assert (back[0, 0, 2] == 0).all()
    assert (back[0, 0, 0] - x[0, 0, 0]).abs().max() <= x[0, 0, 0].abs().max() / 127 / 2 * 1.001
    assert back[0, 0, 3].abs().max() <= 2e-40


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_engine_accepts_them(dtype: torch.dtype, computed: torch.dtype) -> None:
    query, key, value = tensors(6, 30, 16, 2, computed, 2)
    key, value = quantize(key, value, dtype)
    exact = rg.attention(
        query.double(), *(x.dequantize(torch.float64) for x in (key, value)), mask=rg.causal(), engine="reference"
    )
    for engine in (None, "reference", "tiled"):
        output = rg.attention(query, key, value, mask=rg.causal(), engine=engine)
        assert output.dtype == computed
        assert (output - exact).abs().max() < (2e-2 if computed == torch.bfloat16 else 1e-5)


def test_queries_have_gradients_and_modes_see_dequantized_numbers() -> None:
    query, key, value = tensors(6, 30, 16, 2, torch.float32, 3)
    stored = quantize(key, value, torch.int8)
    dense = [x.dequantize() for x in stored]
    query.requires_grad_()
    grads = [torch.autograd.grad(rg.attention(query, *t).sum(), query)[0] for t in (stored, dense)]
    torch.testing.assert_close(*grads)
    with torch.autocast("cpu", torch.bfloat16):
        assert rg.attention(query, *stored).dtype == torch.bfloat16
    # one of them quantized, missing axes, a batch that is shared
    with torch.no_grad():
        torch.testing.assert_close(rg.attention(query, stored[0], dense[1]), rg.attention(query, *dense))
        shared = [rg.QuantizedTensor(x.data[:1], x.scale[:1], x.dtype) for x in stored if x.scale is not None]
        torch.testing.assert_close(rg.attention(query, *shared), rg.attention(query, *(x[:1] for x in dense)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [Cache, lambda **x: FixedCache(40, **x), lambda **x: WindowCache(9, **x)])
def test_a_cache_stores_tokens_as_they_would_be_quantized_at_once(dtype: torch.dtype, make: Any) -> None:
    cache, (_, key, value) = make(dtype=dtype), tensors(1, 37, 8, 2, torch.float32, 4)
    start = 0
    for count in (5, 1, 1, 20, 1, 9):
        keys, values = cache.append(*(x[:, :, start : start + count] for x in (key, value)))
        start += count
        for actual, whole in ((keys, key), (values, value)):
            assert isinstance(actual, rg.QuantizedTensor)
            expected = rg.QuantizedTensor.quantize(whole[:, :, start - actual.shape[2] : start], dtype)
            torch.testing.assert_close(actual.dequantize(), expected.dequantize(), rtol=0, atol=0)
    rows = torch.tensor([1, 1])
    cache.reorder(rows, 0)
    keys, _ = cache.append(key[:, :, :1], value[:, :, :1])
    assert torch.equal(keys.dequantize()[0, :, :-1], keys.dequantize()[1, :, :-1])


def test_a_cache_of_the_dtype_of_its_tokens_returns_tensors() -> None:
    key = torch.randn(1, 2, 3, 8).bfloat16()
    assert isinstance(Cache(dtype=torch.bfloat16).append(key, key)[0], Tensor)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.int8, 2e-2)])
def test_a_layer_decodes_with_a_cache_in_fewer_bytes(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    layer = rg.nn.MultiHeadAttention(32, 4, kv_heads=2, attend=rg.Attention(mask=rg.causal())).eval()
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        whole, cache = layer(x), layer.cache(dtype=dtype)
        steps = torch.cat([layer(part, cache=cache) for part in x.split((7, 1, 1, 3), 1)], 1)
    assert ((steps - whole).norm() / whole.norm()).item() < tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_and_tangents_of_keys_and_values_raise(dtype: torch.dtype) -> None:
    layer = rg.nn.MultiHeadAttention(32, 4, kv_heads=2, attend=rg.Attention(mask=rg.causal()))
    x = torch.randn(1, 6, 32)
    with pytest.raises(RuntimeError, match="no gradients"):
        layer(x, cache=layer.cache(dtype=dtype))
    key = torch.randn(1, 2, 3, 8)
    with pytest.raises(RuntimeError, match="tangents"), forward_ad.dual_level():
        Cache(dtype=dtype).append(forward_ad.make_dual(key, key), key)
    with torch.no_grad():
        assert rg.QuantizedTensor.quantize(key.requires_grad_(), dtype).data.requires_grad is False
        layer(x, cache=layer.cache(dtype=dtype))


def test_stored_numbers_of_another_form_or_with_gradients_raise() -> None:
    data, scale = torch.ones(1, 2, 3, 8, dtype=torch.int8), torch.ones(1, 2, 3)
    scales = [None, scale[:, :, :2], scale.double()]
    for parts in (*((data, wrong) for wrong in scales), (data[0], scale[0]), (data.bfloat16(), scale)):
        with pytest.raises(ValueError, match="for int8 only a scale"):
            rg.QuantizedTensor(*parts, torch.float32)
    with pytest.raises(ValueError, match="dtype of stored keys and values"):
        rg.QuantizedTensor(data.short(), scale, torch.float32)
    for parts in ((data, scale.clone().requires_grad_()), (data.bfloat16().requires_grad_(), None)):
        with pytest.raises(RuntimeError, match="no gradients"):
            rg.QuantizedTensor(*parts, torch.float32)


def test_inspections_ask_for_dequantized_keys() -> None:
    query, key, value = tensors(2, 5, 8, 2, torch.float32, 0)
    stored, _ = quantize(key, value, torch.int8)
    for inspect in (rg.Attention().weights, rg.Attention().map, rg.Attention().statistics):
        with pytest.raises(TypeError, match=r"key\.dequantize\(\)"):
            inspect(query, stored)  # type: ignore[arg-type]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"dtype of stored keys and values must be torch\.bfloat16"):
        Cache(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"must be floating point and \(B, G, K, D\)"):
        rg.QuantizedTensor.quantize(torch.ones(2, 3), torch.int8)
    cache = Cache(dtype=torch.int8)
    cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    with pytest.raises(ValueError, match="dtype and device of the cached tokens"):
        cache.append(torch.ones(1, 1, 1, 4).double(), torch.ones(1, 1, 1, 4).double())
