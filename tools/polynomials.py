"""The coefficients of exp2 in csrc/simd.h, recomputed by Remez' algorithm in high precision.

p(f) = 1 + f r(f) approximates 2^f on [-1/2, 1/2] with the least relative error. r is the best approximation of
(2^f - 1) / f with the weight |f| / 2^f, found by exchanging the points at which the error alternates.

    python -m tools.polynomials
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mpmath import mp, mpf

SIMD = Path(__file__).parent.parent / "csrc/simd.h"


def target(f: mpf) -> mpf:
    return mp.log(2) if f == 0 else (mpf(2) ** f - 1) / f


def value(coefficients: list[mpf], f: mpf) -> mpf:
    return mp.polyval(coefficients[::-1], f)


def error(coefficients: list[mpf], f: mpf) -> mpf:
    """The relative error of 1 + f r(f), with its sign."""
    return (value(coefficients, f) - target(f)) * abs(f) / mpf(2) ** f


def remez(degree: int, digits: int = 50, points: int = 3000) -> tuple[list[mpf], mpf]:
    """The coefficients of r, lowest first, and the largest relative error of p; p has this degree."""
    mp.dps = digits
    count = degree  # of coefficients; the error alternates at one point more
    at = [mp.cos(mp.pi * (2 * n + 1) / (2 * count + 2)) / 2 for n in range(count + 1)][::-1]
    grid = [-mpf(1) / 2 + mpf(n) / points for n in range(points + 1)]
    for _ in range(12):
        rows, right = mp.matrix(count + 1, count + 1), mp.matrix(count + 1, 1)
        for n, f in enumerate(at):
            for k in range(count):
                rows[n, k] = f**k
            rows[n, count] = (-1) ** n * mpf(2) ** f / abs(f)
            right[n] = target(f)
        solved = mp.lu_solve(rows, right)
        coefficients = [solved[k] for k in range(count)]
        errors = [error(coefficients, f) for f in grid]
        runs: list[list[int]] = [[0]]
        for n in range(1, len(grid)):
            if errors[n] * errors[runs[-1][-1]] < 0:
                runs.append([])
            runs[-1].append(n)
        best = [max(run, key=lambda n: abs(errors[n])) for run in runs]
        while len(best) > count + 1:
            best.pop(0 if abs(errors[best[0]]) < abs(errors[best[-1]]) else -1)
        at = [grid[n] for n in best]
    return coefficients, max(map(abs, errors))


def read_coefficients(kind: str) -> list[float]:
    """The coefficients in simd.h, highest first, without the 1 at the end."""
    start = SIMD.read_text().split(f"Vec{kind} exp2_within")[1].split("return")[0]
    return [float(x.rstrip("f")) for x in re.findall(r"[\d.]+(?:e-?\d+)?f?(?=[);])", start)][:-1]


def main() -> int:
    good = True
    for kind, degree, rounding in (("F", 5, 2.0**-25), ("D", 11, 2.0**-54)):
        coefficients, largest = remez(degree)
        print(f"2^f by a polynomial of degree {degree}: relative error {mp.nstr(largest, 3)}")
        for new, old in zip(coefficients[::-1], read_coefficients(kind), strict=True):
            print(f"  {mp.nstr(new, 20):26} simd.h {old!r}")
        old_error = max(
            abs(error([mpf(x) for x in read_coefficients(kind)[::-1]], mpf(n) / 1000)) for n in range(-500, 501)
        )
        print(f"  relative error with the coefficients of simd.h {mp.nstr(old_error, 3)}")
        good &= float(old_error) <= float(largest) + rounding  # that of the coefficients
    return not good


if __name__ == "__main__":
    sys.exit(main())
