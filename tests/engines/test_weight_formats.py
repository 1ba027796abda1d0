"""Weights of fewer bytes: rounding, packing, and products against float64 of the rounded numbers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.engines import native
from regard.engines.packed_linear import PackedWeight, project, why_not
from regard.engines.weight_formats import GROUP, Quantized, quantize

needs_kernels = pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
ROUNDED = ["bfloat16", "int8", "int4", "int4_minimum"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_minimum(weight):
    """Quantise as llama.cpp's Q4_1 does: 16 steps from the least to the largest number of a group."""
    K = weight.shape[1]
    groups = F.pad(weight, (0, -K % GROUP)).unflatten(1, (-1, GROUP))
    minimum = groups.amin(-1).half().float()
    scale = ((groups.amax(-1) - minimum) / 15).half().float()
    numbers = ((groups - minimum[..., None]) / scale.clamp(min=1e-8)[..., None]).round().clamp(0, 15)
    return Quantized("int4_minimum", numbers.flatten(1)[:, :K].to(torch.uint8), scale, minimum)


def packed(weight, format):
    return PackedWeight.pack(with_minimum(weight) if format == "int4_minimum" else weight, format)


def group_error(weight, quantized):
    """The largest error of each group, in units of its largest number."""
    K = weight.shape[1]
    errors, sizes = (
        F.pad(x.abs(), (0, -K % GROUP)).unflatten(1, (-1, GROUP)).amax(-1) for x in (quantized - weight, weight)
    )
    return (errors / sizes.clamp(min=1e-30)).max().item()


@pytest.mark.parametrize(("format", "bound"), [("int8", 0.5 / 127 + 2**-11), ("int4", 1.5 / 8.5)])
@pytest.mark.parametrize("K", [1, 31, 32, 33, 100])
def test_rounding_is_within_a_step(format, bound, K):
    weight = random(17, K) * 10 ** torch.linspace(-3, 3, 17)[:, None]
    assert group_error(weight, quantize(weight, format).dequantize()) <= 1.01 * bound


@pytest.mark.parametrize("factor", [1e-30, 1e30])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_scales_cover_all_magnitudes_of_float32(format, factor):
    weight = random(8, 64) * factor
    assert group_error(weight, quantize(weight, format).dequantize()) < 0.18


@pytest.mark.parametrize("size", [1e-37, 1e-39, 1e-42, 2**-149])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_subnormal_weights_are_packed(format, size):
    for weight in (random(40, 64).clamp(-1, 1) * size, random(40, 64).abs() * size):
        quantized = quantize(weight, format)
        assert (quantized.dequantize() - weight).abs().max() <= 0.2 * weight.abs().max() + 8 * 2**-149
        assert torch.equal(PackedWeight.pack(quantized).unpack(), quantized.dequantize())


def test_scales_of_very_different_groups_are_packed():
    numbers, scale = torch.ones(32, 64, dtype=torch.uint8), torch.full((32, 2), 3 * 2.0**-39)
    minimum = torch.tensor([1.0, 0.0]).expand(32, 2)  # 2^15 and 3 * 2^-24 are float16 numbers
    quantized = Quantized("int4_minimum", numbers, scale, minimum)
    assert torch.equal(PackedWeight.pack(quantized).unpack(), quantized.dequantize())


def test_int4_has_less_error_than_one_scale_by_the_largest_number():
    weight = random(64, 256)
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    simple = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    assert (quantize(weight, "int4").dequantize() - weight).norm() < 0.95 * (simple - weight).norm()


def test_int4_with_a_minimum_has_less_error_than_steps_from_the_least_to_the_largest_number():
    weight = random(64, 256).square()
    quantized = quantize(weight, "int4")
    assert quantized.format == "int4_minimum"
    simple = with_minimum(weight).dequantize()
    assert (quantized.dequantize() - weight).norm() < 0.95 * (simple - weight).norm()


def test_groups_of_zeros_stay_zeros():
    weight = random(4, 96)
    weight[:, 32:64] = 0
    for format in ("int8", "int4"):
        assert not quantize(weight, format).dequantize()[:, 32:64].any()


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    M=st.sampled_from([1, 2, 3, 4, 5, 7, 11, 12, 13, 26, 131]), N=st.integers(1, 140), K=st.integers(1, 330),
    format=st.sampled_from(ROUNDED), bias=st.booleans(), threads=st.sampled_from([1, 2]), seed=st.integers(0, 99),
    outliers=st.booleans(),
)  # fmt: skip
def test_products_are_those_of_the_rounded_numbers(M, N, K, format, bias, threads, seed, outliers):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight, b = random(M, K, seed=seed), packed(random(N, K, seed=seed + 1), format), random(N) if bias else None
        if outliers:
            x[M // 2, :: 1 + K // 4] *= 50
        with torch.no_grad():
            output = F.linear(x, weight, b)
        plain, given, step = weight.unpack().double(), *rounded_inputs(x, format)
        b = None if b is None else b.double()
        exact = F.linear(given, plain, b)
        # The sum of a row has the rounding of its terms, and at most 256 of them are added up in one sum. With integer
        # products the terms of a group are its integers times the scale, and times the minimum.
        terms = plain.abs() + 2 * largest_minimum(weight)
        sizes = F.linear(given.abs(), terms, None if b is None else b.abs())
        assert ((output - exact).abs() <= (min(K, 256) / 4 + 8) * 2**-24 * sizes + 1e-30).all()
        assert ((exact - F.linear(x.double(), plain, b)).abs() <= F.linear(0.5001 * step, plain.abs()) + 1e-30).all()
    finally:
        torch.set_num_threads(before)


def rounded_inputs(x, format):
    """Return x as the kernel of this CPU multiplies it, in float64, and the steps that it was rounded to."""
    if format == "bfloat16" or not native.rounds_inputs():
        return x.double(), torch.zeros_like(x, dtype=torch.float64)
    K = x.shape[1]
    groups = F.pad(x, (0, -K % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scaled, step = torch.where(largest > 0, groups * (127 / largest), 0.0), (largest / 127).double()
    digits, second = scaled.round(), ((scaled - scaled.round()) * 254).round()
    is_fine = largest > 4 * x.square().mean(1)[:, None, None].sqrt()
    rounded = torch.where(is_fine, digits + second.double() / 254, digits.double()) * step
    step = torch.where(is_fine, step / 254, step).expand_as(digits)
    return rounded.flatten(1)[:, :K], step.flatten(1)[:, :K]


def largest_minimum(weight):
    content = weight.quantized()
    return 0.0 if content is None or content.minimum is None else content.minimum.abs().max().double()


@needs_kernels
@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("value", [1.0, 1e30, 1e-42, float("nan"), float("inf")])
def test_a_row_does_not_depend_on_the_others(format, value):
    x, weight = random(40, 100), packed(random(70, 100, seed=1), format)
    with torch.no_grad():
        alone = torch.cat([F.linear(row[None], weight) for row in x])
        changed = x.clone()
        changed[7, 40] = value
        for count in (8, 20, 40):
            output, others = F.linear(changed[:count], weight), torch.arange(count) != 7
            assert (output[others] - alone[:count][others]).abs().max() < 1e-4
            assert torch.equal(output[others], F.linear(x[:count], weight)[others])


@needs_kernels
@pytest.mark.parametrize("format", ["int8", "int4", "int4_minimum"])
def test_the_largest_and_least_inputs_are_finite(format):
    weight = packed(random(40, 64), format)
    for size in (1e-44, 1e-38, 1e-30, 1e35):
        x = random(9, 64) * size
        with torch.no_grad():
            output, exact = F.linear(x, weight), F.linear(x.double(), weight.unpack().double())
        assert ((output - exact).abs() <= 0.05 * exact.abs().max() + 1e-28).all()


@needs_kernels
@pytest.mark.parametrize("format", ROUNDED)
def test_rows_are_looked_up_and_selected(format):
    weight = packed(random(70, 45), format)
    plain, ids = weight.unpack(), torch.tensor([[0, 69, 31], [32, 33, 7]])
    with torch.no_grad():
        assert torch.equal(F.embedding(ids, weight), plain[ids])
        x, whole = random(3, 45, seed=2), F.linear(random(3, 45, seed=2), weight)
        assert torch.equal(project(x, weight, rows=(5, 66)), whole[:, 5:66])
        assert torch.equal(weight.clone(), plain)


@needs_kernels
@pytest.mark.parametrize("format", ["float32", *ROUNDED])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16])
def test_ids_of_other_types_raise_as_in_torch(format, dtype):
    weight, ids = packed(random(64, 32), format), torch.tensor([1, 0, 1]).to(dtype)
    for each in (weight, weight.unpack()):
        with torch.no_grad(), pytest.raises(RuntimeError, match="scalar types"):
            F.embedding(ids, each)


@needs_kernels
@pytest.mark.parametrize("format", ["int8", "int4", "int4_minimum"])
@pytest.mark.parametrize(("size", "inputs"), [(9e33, 1e-20), (1e-36, 1e30)])
def test_products_of_the_largest_and_least_weights_are_finite(format, size, inputs):
    weight = packed(random(40, 64).clamp(-1, 1) * size, "int8" if format == "int8" else "int4")
    x = random(9, 64, seed=1) * inputs
    with torch.no_grad():
        output, exact = F.linear(x, weight), F.linear(x.double(), weight.unpack().double())
    assert ((output - exact).abs() <= 0.05 * exact.abs().max()).all()


@needs_kernels
@pytest.mark.parametrize("format", ROUNDED)
def test_nan_and_infinity_spread_as_in_torch(format):
    weight = packed(random(40, 64), format)
    for value in (float("nan"), float("inf"), -float("inf")):
        for rows in (1, 3, 30):
            x = random(rows, 64, seed=3)
            x[rows // 2, 5] = value
            with torch.no_grad():
                output, expected = F.linear(x, weight), F.linear(x, weight.unpack())
            assert torch.equal(output.isfinite(), expected.isfinite())
            assert torch.equal(output.isnan(), expected.isnan())
            assert torch.equal(output == value, expected == value)


@needs_kernels
def test_weights_that_cannot_be_rounded_report_why():
    weight = random(64, 64)
    weight[3, 4] = float("inf")
    assert "NaN or infinite" in why_not(weight, "int8")
    weight[3, 4] = 3.4e38  # a multiple of a rounded scale would be infinite
    assert "above 1e+34" in why_not(weight, "int4")
    assert not why_not(weight, "bfloat16")
    assert not why_not(random(9, 8), "int8")  # padded rows, but fewer bytes than in float32
    assert "padded" in why_not(random(9, 8))
    with pytest.raises(ValueError, match="float16 numbers"):
        PackedWeight.pack(Quantized("int8", torch.ones(2, 32, dtype=torch.int8), torch.full((2, 1), 1 / 3)))


@needs_kernels
@pytest.mark.parametrize("format", ROUNDED)
def test_copies_and_pickles_keep_every_number(format):
    weight = packed(random(40, 45), format)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(other) is PackedWeight
        assert other.format == format
        assert torch.equal(other.unpack(), weight.unpack())
        assert other.panels.data_ptr() != weight.panels.data_ptr()


@needs_kernels
def test_gradients_are_those_of_the_rounded_weight():
    weight = packed(random(40, 45), "int8").requires_grad_()
    x = random(3, 45).requires_grad_()
    F.linear(x, weight).square().sum().backward()
    plain, y = weight.unpack().requires_grad_(), x.detach().clone().requires_grad_()
    F.linear(y, plain).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(weight.grad, plain.grad)


@pytest.mark.parametrize("K", [64, 70])
def test_weights_of_sixteen_steps_are_found_again(K):
    weight = with_minimum(random(8, K)).dequantize()
    quantized = quantize(weight, "int4")
    assert quantized.format == "int4_minimum"
    assert (quantized.dequantize() - weight).abs().max() < 1e-3
    assert quantize(random(8, K), "int4").format == "int4"
