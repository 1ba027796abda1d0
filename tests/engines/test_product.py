"""Products with weights that were laid out once, against float64."""

import copy

import pytest
import torch
import torch.nn.functional as F

from regard.engines import native
from regard.engines.product import product

pytestmark = pytest.mark.skipif(bool(native.missing()), reason="needs the compiled library")


def made(M, N, K, bias=True):
    generator = torch.Generator().manual_seed(M * 10000 + N * 100 + K)
    x, weight = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    return x, weight, torch.randn(N, generator=generator) if bias else None


def laid_out(*arguments, **options):
    with torch.no_grad():
        return product(*arguments, **options)


def error(found, x, weight, bias):
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return (found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 6, 7, 13, 31, 130])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (16, 8), (17, 9), (50, 33), (131, 600), (64, 1100)])
def test_the_kernel_agrees_with_float64_as_well_as_torch_does(M, N, K, threads):
    x, weight, bias = made(M, N, K, bias=N % 2 == 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = laid_out(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    assert error(found, x, weight, bias) <= 2 * error(F.linear(x, weight, bias), x, weight, bias) + 5e-7


def test_the_kernel_is_really_used(monkeypatch):
    calls = []
    real = native.multiply
    monkeypatch.setattr(native, "multiply", lambda *a: (calls.append(1), real(*a))[1])
    x, weight, bias = made(3, 40, 20)
    laid_out(x, weight, bias)
    assert len(calls) == 1


def test_the_same_bits_come_at_every_call():
    x, weight, bias = made(13, 40, 20)
    assert torch.equal(laid_out(x, weight, bias), laid_out(x, weight, bias))


def test_a_weight_that_changes_is_laid_out_again():
    x, weight, bias = made(3, 40, 20)
    laid_out(x, weight, bias)
    weight.mul_(2)
    assert error(laid_out(x, weight, bias), x, weight, bias) < 1e-6
    weight.data.mul_(2)  # not counted as a change
    assert error(laid_out(x, weight, bias, rows=(16, 40)), x, weight[16:], bias[16:]) < 1e-6
    weight.data = torch.randn(40, 20)
    assert error(laid_out(x, weight, bias), x, weight, bias) < 1e-6


def test_rows_of_a_weight_that_begin_anywhere():
    x, weight, bias = made(5, 80, 20)
    for first, last in ((0, 80), (0, 7), (16, 48), (32, 80), (5, 30)):
        found = laid_out(x, weight, bias, rows=(first, last))
        assert error(found, x, weight[first:last], bias[first:last]) < 1e-6


def test_inputs_of_any_shape_and_stride():
    x, weight, bias = made(24, 40, 20)
    for given in (x.view(2, 3, 4, 20), x.view(4, 6, 20).transpose(0, 1), x[::2], x[0], x[:0], x.t().contiguous().t()):
        assert torch.allclose(laid_out(given, weight, bias), F.linear(given, weight, bias), atol=1e-5)


def test_what_is_to_be_differentiated_is_torchs():
    x, weight, bias = made(3, 40, 20)
    laid_out(x, weight, bias)
    weight.requires_grad_()
    product(x, weight, bias).sum().backward()
    assert torch.allclose(weight.grad, x.sum(0).expand(40, 20), atol=1e-5)


def test_other_dtypes_and_transforms_are_torchs():
    x, weight, bias = made(3, 40, 20)
    assert laid_out(x.double(), weight.double(), bias.double()).dtype == torch.float64
    with torch.no_grad():
        assert torch.func.vmap(lambda row: product(row, weight, bias))(x).shape == (3, 40)
        with torch.autocast("cpu"):
            assert product(x, weight, bias).dtype == torch.bfloat16


def test_a_copied_model_has_its_own():
    layer = torch.nn.Linear(20, 40)
    x = torch.randn(3, 20)
    laid_out(x, layer.weight, layer.bias)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.allclose(laid_out(x, other.weight, other.bias), other.bias.detach().expand(3, 40))


def test_a_wrong_width_is_torchs_error():
    x, weight, bias = made(3, 40, 20)
    laid_out(x, weight, bias)
    with pytest.raises(RuntimeError):
        product(x[:, :19], weight, bias)
