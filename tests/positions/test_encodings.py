"""Absolute positions: the sinusoidal table and the learned one."""

import math

import pytest
import torch

from regard.positions.encodings import learned, sinusoidal


def formula(length, d_model):
    table = torch.empty(length, d_model, dtype=torch.float64)
    for pos in range(length):
        for channel in range(d_model):
            angle = pos / 10000 ** (2 * (channel // 2) / d_model)
            table[pos, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
    return table


@pytest.mark.parametrize(("length", "d_model"), [(1, 1), (7, 2), (33, 8), (20, 5), (3, 64), (0, 4)])
def test_the_sinusoidal_table_is_the_formula_also_for_odd_widths(length, d_model):
    torch.testing.assert_close(sinusoidal(length, d_model, dtype=torch.float64), formula(length, d_model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_table_is_rounded_once_to_its_dtype_even_far_out(dtype):
    table = sinusoidal(100_001, 6, dtype=dtype)
    exact = [f(100_000 / 10000 ** (2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]
    torch.testing.assert_close(table[-1], torch.tensor(exact, dtype=torch.float64).to(dtype))
    assert table.dtype == dtype


def test_the_table_has_torchs_default_dtype_and_device_by_default():
    assert sinusoidal(2, 4).dtype == torch.get_default_dtype()
    assert sinusoidal(2, 4, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert sinusoidal(2, 4).device.type == "meta"


def test_the_sinusoidal_table_compiles():
    compiled = torch.compile(lambda x: x + sinusoidal(x.shape[-2], x.shape[-1]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(torch.zeros(5, 6)), sinusoidal(5, 6))


def test_a_learned_table_is_a_parameter_with_the_asked_spread_and_follows_the_seed():
    torch.manual_seed(0)
    table = learned(1000, 64, std=0.5)
    assert isinstance(table, torch.nn.Parameter)
    assert table.shape == (1000, 64)
    assert table.requires_grad
    assert abs(table.std().item() - 0.5) < 0.01
    assert abs(table.mean().item()) < 0.01
    torch.manual_seed(0)
    assert torch.equal(table, learned(1000, 64, std=0.5))
    assert abs(learned(1000, 64).std().item() - 0.02) < 0.001


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: sinusoidal(-1, 4), ValueError, "length must be at least 0, but is -1"),
        (lambda: sinusoidal(4, 0), ValueError, "d_model must be at least 1, but is 0"),
        (lambda: sinusoidal(4.0, 4), TypeError, "length must be an integer, but is float 4.0"),
        (lambda: sinusoidal(4, True), TypeError, "d_model must be an integer, but is bool"),
        (
            lambda: sinusoidal(4, 4, dtype=torch.int64),
            TypeError,
            "dtype must be a floating point dtype, but is torch.int64",
        ),
        (lambda: learned(4, "8"), TypeError, "d_model must be an integer, but is str"),
        (lambda: learned(4, 8, std=-1.0), ValueError, "std must be finite and not negative, but is -1.0"),
        (lambda: learned(4, 8, std="big"), TypeError, "std must be a number, but is str"),
    ],
)
def test_errors_name_the_expected_and_the_actual_value(call, kind, message):
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        call()
