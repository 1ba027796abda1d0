"""The elementary functions of the kernels, on every instruction set of this machine: errors in ULP, and all halves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tools.functions import FUNCTIONS, Function, Library, errors, sample

from tools import functions, polynomials

INF, NAN = np.inf, np.nan


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Library]:
    path = functions.build()
    if path is None:
        pytest.skip("CMake and a C++ compiler are needed to build the functions")
    return [Library(path, isa) for isa in functions.instruction_sets(path)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_errors_are_within_their_units_in_the_last_place(
    libraries: list[Library], function: Function, dtype: type
) -> None:
    allowed = function.ulp[0 if dtype == np.float32 else 1]
    for library, (ulp, x) in zip(libraries, errors(libraries, function, sample(dtype, 1 << 18)), strict=True):
        assert ulp <= allowed, f"{library.isa}: off by {ulp:.3g} ULP at {x!r}"


SPECIAL = {
    "exp2": [(NAN, NAN), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (1e-40, 1.0), (-1e30, 0.0), (-126.0, 2.0**-126)],
    "exp": [(0.0, 1.0), (-0.0, 1.0), (1e-40, 1.0), (NAN, NAN)],
    "log2": [(1.0, 0.0), (2.0, 1.0), (0.5, -1.0), (2.0**-126, -126.0)],
    "reciprocal": [(NAN, NAN)],
    "tanh": [(NAN, NAN), (INF, 1.0), (-INF, -1.0), (-1e30, -1.0), (0.0, 0.0), (-0.0, -0.0), (1e-40, 1e-40)],
    "precise_tanh": [(NAN, NAN), (INF, 1.0), (-INF, -1.0), (1e30, 1.0), (-0.0, -0.0), (1e-40, 1e-40)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(libraries: list[Library], name: str, dtype: type) -> None:
    given, expected = (np.array(x, dtype) for x in zip(*SPECIAL[name], strict=True))
    for library in libraries:
        np.testing.assert_array_equal(library(name, given), expected, err_msg=library.isa)


def test_tanh_is_one_only_where_no_other_number_is_nearer(libraries: list[Library]) -> None:
    """Gradients have the factor 1 - tanh^2, which must be exactly 0 when saturated."""
    x = np.float32([9.02, 12.0, 88.0, 3e38])
    for library in libraries:
        assert (library("tanh", x) == 1).all()
        assert (library("tanh", -x) == -1).all()


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("name", HALVES)
def test_all_halves_become_the_same_floats(libraries: list[Library], name: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(halves.view(np.int16)).view(HALVES[name]).float().numpy()
    for library in libraries:
        actual = library(f"widen_{name}", halves, np.float32)
        np.testing.assert_array_equal(actual, expected, err_msg=library.isa)
        finite = np.isfinite(expected) & (expected == 0)
        assert (np.signbit(actual[finite]) == np.signbit(expected[finite])).all()


@pytest.mark.parametrize("name", HALVES)
def test_all_halves_and_what_lies_between_are_rounded_to_even(libraries: list[Library], name: str) -> None:
    halves = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(HALVES[name]).float().numpy()
    with np.errstate(all="ignore"):
        ordered = np.unique(halves[np.isfinite(halves)])
        middle = ((ordered[1:].astype(np.float64) + ordered[:-1]) / 2).astype(np.float32)
        adjacent = [np.nextafter(x, np.float32(to)) for x in (middle, ordered) for to in (-INF, INF)]
    given = np.concatenate([halves, middle, *adjacent, sample(np.float32, 1 << 18)])
    expected = torch.from_numpy(given).to(HALVES[name])
    bits = expected.view(torch.int16).numpy().view(np.uint16)
    for library in libraries:
        actual = library(f"narrow_{name}", given, np.uint16)
        nan = np.isnan(given)
        np.testing.assert_array_equal(actual[~nan], bits[~nan], err_msg=library.isa)
        back = torch.from_numpy(actual[nan].view(np.int16)).view(HALVES[name])
        assert bool(back.isnan().all()), library.isa


def test_the_coefficients_of_exp2_are_the_best_ones() -> None:
    best, largest = polynomials.remez(5, digits=30, points=400)
    written = polynomials.read_coefficients("F")[::-1]
    np.testing.assert_allclose(written, [float(x) for x in best], rtol=1e-4)
    worst = max(abs(float(polynomials.error(written, n / 1000))) for n in range(-500, 501))
    assert worst <= float(largest) + 2.0**-25
