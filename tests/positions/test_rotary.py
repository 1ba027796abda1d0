"""Rotary positions, compared with one complex number per pair in plain Python."""

import cmath
import math
from dataclasses import dataclass

import pytest
import torch

from regard.positions.rotary import Dynamic, Linear, Llama3, Yarn, rotary

LLAMA3 = Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original=64)
SCALINGS = [None, Linear(4.0), Dynamic(2.0, original=4), Yarn(4.0, original=64), LLAMA3]


def rotate_by_complex(vector, position, frequencies, d_rotary, interleaved, magnitude=1.0):
    """Rotate one token: each pair of channels is a complex number, multiplied by exp(i angle)."""
    result = list(vector)
    for i, frequency in enumerate(frequencies):
        at = (2 * i, 2 * i + 1) if interleaved else (i, i + d_rotary // 2)
        z = complex(vector[at[0]], vector[at[1]]) * cmath.rect(magnitude, position * frequency)
        result[at[0]], result[at[1]] = z.real, z.imag
    return result


def plain(base, d_rotary):
    return [base ** (-2 * i / d_rotary) for i in range(d_rotary // 2)]


def naive(x, positions, base, d_rotary, interleaved):
    flat = torch.empty_like(x)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for n in range(x.shape[2]):
                position = int(positions[b][n])
                values = rotate_by_complex(x[b, h, n].tolist(), position, plain(base, d_rotary), d_rotary, interleaved)
                flat[b, h, n] = torch.tensor(values, dtype=x.dtype)
    return flat


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "d_rotary"), [(8, None), (8, 4), (7, 6), (6, 2)])
@pytest.mark.parametrize("base", [10000.0, 500])
def test_every_pair_is_rotated_by_its_position_times_its_frequency(interleaved, size, d_rotary, base):
    x = torch.randn(2, 3, 5, size, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 0, 1000, -3]])
    out = rotary(x, positions, base=base, d_rotary=d_rotary, interleaved=interleaved)
    torch.testing.assert_close(out, naive(x, positions, base, d_rotary or size, interleaved), rtol=0, atol=1e-12)


def test_positions_may_be_left_out_be_a_start_be_shared_or_be_one_row_each():
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(rotary(x), rotary(x, torch.arange(5)))
    assert torch.equal(rotary(x, 9), rotary(x, torch.arange(9, 14)))
    assert torch.equal(rotary(x, torch.arange(5)[None]), rotary(x))
    assert torch.equal(rotary(x, torch.arange(5).expand(2, 5)), rotary(x))
    assert torch.equal(rotary(x, torch.arange(5, dtype=torch.int32)), rotary(x))


def test_two_and_three_axes_come_back_with_their_own_shape():
    x = torch.randn(3, 5, 8)
    assert torch.equal(rotary(x, 2), rotary(x[None], 2)[0])
    assert torch.equal(rotary(x[0], torch.arange(5)[None]), rotary(x[None])[0, 0])


def test_products_of_rotated_vectors_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 16, dtype=torch.float64)
    near = rotary(q, 10) @ rotary(k, 7).T
    torch.testing.assert_close(near, rotary(q, 100_010) @ rotary(k, 100_007).T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_is_rotated_in_float32_and_rounded_once(dtype, interleaved):
    x = torch.randn(2, 2, 9, 16).to(dtype)
    out = rotary(x, 100_000, interleaved=interleaved)
    exact = rotary(x.double(), 100_000, interleaved=interleaved)
    assert out.dtype == dtype
    torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_finite_differences(scaling, interleaved):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(3, 8)

    def run(x):
        return rotary(x, positions, d_rotary=4, interleaved=interleaved, scaling=scaling)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [(None, None), (SCALINGS[2], 3), *((s, torch.tensor([[0, 4, 2, 9, 1], [5, 6, 7, 8, 9]])) for s in SCALINGS)],
)
def test_it_compiles_into_one_graph_forward_and_backward(scaling, positions):
    def run(x):
        return rotary(x, positions, scaling=scaling, interleaved=True)

    torch.compiler.reset()
    x = torch.randn(2, 2, 5, 8, requires_grad=True)
    out = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    torch.testing.assert_close(out, run(x))
    (fast,) = torch.autograd.grad(out.square().sum(), x)
    (slow,) = torch.autograd.grad(run(x).square().sum(), x)
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_it_maps_over_a_leading_axis_of_inputs_and_of_positions(scaling):
    x, positions = torch.randn(3, 2, 2, 5, 8), torch.tensor([[0, 1, 2, 3, 4], [9, 9, 9, 9, 9], [4, 3, 2, 1, 0]])
    out = torch.func.vmap(lambda x, at: rotary(x, at, scaling=scaling))(x, positions)
    torch.testing.assert_close(
        out, torch.stack([rotary(*one, scaling=scaling) for one in zip(x, positions, strict=True)])
    )


def test_inputs_that_are_expanded_transposed_or_empty_are_fine():
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert torch.equal(rotary(x), rotary(x.contiguous()))
    wide = torch.randn(1, 1, 5, 8).expand(2, 3, 5, 8)
    assert torch.equal(rotary(wide), rotary(wide.contiguous()))
    for shape in [(0, 2, 5, 8), (2, 2, 0, 8)]:
        for scaling in SCALINGS:
            assert rotary(torch.empty(shape), scaling=scaling).shape == shape


def test_the_channels_beyond_the_width_pass_through():
    x = torch.randn(1, 1, 4, 10)
    assert torch.equal(rotary(x, d_rotary=4)[..., 4:], x[..., 4:])
    torch.testing.assert_close(rotary(x, d_rotary=4)[..., :4], rotary(x[..., :4]))


def test_linear_scaling_divides_every_angle():
    x = torch.randn(6, 8, dtype=torch.float64)
    slow = rotary(x, torch.tensor([0, 4, 8, 12, 16, 20]), scaling=Linear(4.0))
    torch.testing.assert_close(slow, rotary(x))


def test_dynamic_scaling_starts_beyond_the_original_length_and_follows_the_longest_position():
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    for original in (4, 16):
        assert torch.equal(rotary(x, scaling=Dynamic(2.0, original=original)), rotary(x))
    # 12 positions of 4: 2 * 12 / 4 - 1 = 5, and 8 / (8 - 2) = 4 / 3
    stretched = rotary(x, base=10000.0 * 5 ** (4 / 3))
    result = Dynamic(2.0, original=4).frequencies(10000.0, 8, torch.tensor([[3, 0], [1, 11]]))
    torch.testing.assert_close(result.tolist(), [plain(10000.0, 8), plain(10000.0 * 5 ** (4 / 3), 8)])
    long = torch.cat((x, x, x), dim=2)
    out = rotary(long, scaling=Dynamic(2.0, original=4))
    torch.testing.assert_close(out[:, :, :4], stretched)


def test_dynamic_scaling_of_a_row_does_not_depend_on_the_others():
    x, scaling = torch.randn(3, 2, 12, 8), Dynamic(2.0, original=4)
    positions = torch.arange(12).minimum(torch.tensor([[11], [2], [6]]))
    together = rotary(x, positions, scaling=scaling)
    for row in range(3):
        alone = rotary(x[row : row + 1], positions[row : row + 1], scaling=scaling)
        torch.testing.assert_close(together[row : row + 1], alone)
    one = rotary(x[2:, :, :7], scaling=scaling)
    torch.testing.assert_close(together[2:, :, :7], one)


def test_dynamic_scaling_of_one_pair_changes_nothing_since_no_base_does():
    x = torch.randn(9, 2)
    assert torch.equal(rotary(x, scaling=Dynamic(2.0, original=4)), rotary(x))


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_ramps_between():
    # base 10000, d_rotary 64, 4096 positions: pair(32) = 64 ln(4096 / 64 pi) / (2 ln 10000) = 10.47 -> 10,
    # pair(1) = 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51 -> 23
    result = Yarn(4.0, original=4096).frequencies(10000.0, 64, torch.arange(3)).tolist()
    for i, (frequency, kept) in enumerate(zip(result, plain(10000.0, 64), strict=True)):
        share = min(max((i - 10) / 13, 0), 1)
        assert frequency == pytest.approx(kept * (1 - share) + kept / 4 * share, rel=1e-12)


@pytest.mark.parametrize(
    ("base", "original", "first", "last"),
    [
        (100.0, 4096, 2, 6),  # pairs 2.62 and 5.63, of which only 0 ... 3 exist
        (100.0, 100_000, 5, 7),  # pairs 5.39 and 8.40: the ramp ends at d_rotary - 1 at the latest
        (10000.0, 64, 0, 2),  # pairs -0.50 and 1.01: it starts at 0 at the earliest
    ],
)
def test_yarns_ramp_is_cut_at_the_ends_as_in_the_papers_code(base, original, first, last):
    result = Yarn(4.0, original=original).frequencies(base, 8, torch.arange(3)).tolist()
    for i, (frequency, kept) in enumerate(zip(result, plain(base, 8), strict=True)):
        share = min(max((i - first) / (last - first), 0), 1)
        assert frequency == pytest.approx(kept * (1 - share) + kept / 4 * share, rel=1e-12)


def test_yarn_with_a_ramp_of_no_length_steps_from_kept_to_divided():
    # 6 positions: fewer than one turn, pairs -1.97 and -0.02, both cut to 0
    result = Yarn(4.0, original=6).frequencies(10000.0, 8, torch.arange(3)).tolist()
    kept = plain(10000.0, 8)
    assert result == pytest.approx([kept[0], *(frequency / 4 for frequency in kept[1:])], rel=1e-12)


def test_yarn_without_truncation_ramps_from_where_the_turns_are_met_exactly():
    first, last = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32, 1))
    result = Yarn(4.0, original=4096, truncate=False).frequencies(10000.0, 64, torch.arange(3)).tolist()
    for i, (frequency, kept) in enumerate(zip(result, plain(10000.0, 64), strict=True)):
        share = min(max((i - first) / (last - first), 0), 1)
        assert frequency == pytest.approx(kept * (1 - share) + kept / 4 * share, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        (Yarn(4.0, original=64), 1.1386294361119891),  # 0.1 ln 4 + 1
        (Yarn(1.0, original=64), 1.0),
        (Yarn(4.0, original=64, attention_factor=0.7), 0.7),
        (Yarn(40.0, original=64, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (Yarn(40.0, original=64, mscale=0.707, mscale_all_dim=0.5), 1.2608037 / 1.1844440),
        (Yarn(40.0, original=64, mscale=0.707), 1.3688879),
        (Linear(4.0), 1.0),
        (LLAMA3, 1.0),
    ],
)
def test_the_turned_channels_grow_by_the_magnitude_and_the_others_do_not(scaling, magnitude):
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-6)
    x = torch.randn(3, 12, dtype=torch.float64)
    out = rotary(x, d_rotary=8, scaling=scaling)
    torch.testing.assert_close(out[:, :8].norm(dim=1), x[:, :8].norm(dim=1) * scaling.magnitude)
    assert torch.equal(out[:, 8:], x[:, 8:])


def test_llama3_divides_long_wavelengths_keeps_short_ones_and_passes_smoothly_between():
    scaling = Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original=8192)
    actual = scaling.frequencies(500000.0, 128, torch.arange(3)).tolist()
    kinds = set()
    for frequency, kept in zip(actual, plain(500000.0, 128), strict=True):
        wavelength = 2 * math.pi / kept
        if wavelength < 8192 / 4:
            expected, kind = kept, "kept"
        elif wavelength > 8192:
            expected, kind = kept / 8, "divided"
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected, kind = (1 - smooth) * kept / 8 + smooth * kept, "between"
        kinds.add(kind)
        assert frequency == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "divided", "between"}


def test_any_object_with_frequencies_and_a_magnitude_is_a_scaling():
    @dataclass(frozen=True)
    class Still:
        magnitude: float = 3.0

        def frequencies(self, base, d_rotary, positions):
            return torch.zeros(d_rotary // 2, dtype=torch.float64)

    x = torch.randn(5, 8)
    torch.testing.assert_close(rotary(x, scaling=Still()), 3 * x)


def test_scalings_are_values_that_print_themselves():
    assert repr(Linear(4.0)) == "Linear(factor=4.0)"
    assert repr(Dynamic(2.0, original=16)) == "Dynamic(factor=2.0, original=16)"
    assert eval(repr(Yarn(4.0, original=64))) == Yarn(4.0, original=64)
    assert eval(repr(LLAMA3)) == LLAMA3
    assert hash(Linear(4.0)) == hash(Linear(4.0))


X = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: rotary([1.0]), TypeError, "x must be a tensor, but is list; try torch.as_tensor"),
        (lambda: rotary(X.long()), TypeError, "x must be floating point, but is torch.int64; try x.float"),
        (lambda: rotary(X[0, 0, 0]), ValueError, "x must have the shape .* but its shape is .8,."),
        (lambda: rotary(X[..., :7]), ValueError, "x must have an even width D .* but it is 7; try d_rotary=6"),
        (lambda: rotary(X, d_rotary=3), ValueError, "d_rotary must be even and between 2 and D = 8, but is 3"),
        (lambda: rotary(X, d_rotary=10), ValueError, "d_rotary must be even and between 2 and D = 8, but is 10"),
        (lambda: rotary(X, d_rotary=0.5), TypeError, "d_rotary must be an integer, but is float 0.5"),
        (lambda: rotary(X, base=0.0), ValueError, "base must be finite and greater than 1, but is 0.0"),
        (lambda: rotary(X, base="big"), TypeError, "base must be a number, but is str"),
        (
            lambda: rotary(X, [0, 1]),
            TypeError,
            "positions must be a tensor of integers, .* but is list; try torch.tensor",
        ),
        (
            lambda: rotary(X, torch.rand(5)),
            TypeError,
            "positions must be integers, but is torch.float32; try positions.long",
        ),
        (
            lambda: rotary(X, torch.arange(4)),
            ValueError,
            r"positions must have the shape \(N,\) = \(5,\) .* but is \(4,\)",
        ),
        (lambda: rotary(X, torch.zeros(3, 5).long()), ValueError, r"\(B, N\) = \(2, 5\) .* but is \(3, 5\)"),
        (
            lambda: rotary(X, torch.zeros(5, device="meta").long()),
            ValueError,
            "positions must be on the device of x, cpu",
        ),
        (
            lambda: rotary(X, scaling="yarn"),
            TypeError,
            "scaling must be None or one of Linear, Dynamic, Yarn, Llama3 and LongRope",
        ),
        (lambda: rotary(X, scaling=Linear), TypeError, "scaling must be None or one of Linear"),
        (lambda: Linear(0.5), ValueError, "factor must be finite and at least 1, but is 0.5"),
        (lambda: Linear(float("nan")), ValueError, "factor must be finite and at least 1, but is nan"),
        (lambda: Linear("2"), TypeError, "factor must be a number, but is str '2'; try factor=float"),
        (lambda: Dynamic(2.0, original=0), ValueError, "original must be finite and at least 1, but is 0"),
        (lambda: Yarn(2.0, 64, beta_fast=1.0, beta_slow=2.0), ValueError, "beta_fast must be greater than beta_slow"),
        (lambda: Yarn(2.0, 64, beta_slow=0.0), ValueError, "beta_slow must be finite and greater than 0, but is 0.0"),
        (lambda: Yarn(2.0, 64, attention_factor=0.0), ValueError, "attention_factor must be finite and greater than 0"),
        (lambda: Yarn(2.0, 64, mscale=-1.0), ValueError, "mscale must be finite and at least 0, but is -1.0"),
        (lambda: Llama3(2.0, 4.0, 1.0, 64), ValueError, "high_frequency must be greater than low_frequency"),
    ],
)
def test_errors_name_the_expected_and_the_actual_value(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
