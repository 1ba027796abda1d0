"""The elementary functions of the kernels against exact results: errors in units in the last place (ULP).

`make functions` tries all float32 numbers on which the functions depend, on every instruction set of this machine, and
writes the table of docs/inside/rounding.md; tests/test_functions.py tries some millions. Exact results are those of
numpy in more digits: float64 for float32, x87's long double (64 bits of mantissa) for float64.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/inside/rounding.md"
FOLDER = ROOT / "build/functions"
BLOCK = 1 << 22


@dataclass(frozen=True)
class Function:
    """A function, the range to test, and its largest permitted error there in ULP, in float32 and float64.

    Of float32 all numbers with an absolute value from `first` to `last` are tried. Smaller ones give 1 or themselves
    but for their last digits, larger ones saturate, or differ from these by a power of two.
    """

    name: str
    exact: Callable[[np.ndarray], np.ndarray]
    domain: Callable[[np.ndarray, np.finfo], np.ndarray]
    ulp: tuple[float, float]
    first: float
    last: float


def _one_over(x: np.ndarray) -> np.ndarray:
    return 1 / x


def _normal(x: np.ndarray, kind: np.finfo) -> np.ndarray:
    return (np.abs(x) >= kind.tiny) & np.isfinite(x)


FUNCTIONS = [
    Function("exp2", np.exp2, lambda x, k: (x > k.minexp) & (x < k.maxexp - 0.5), (2.5, 2.0), 2**-14, 128),
    Function("exp", np.exp, lambda x, k: np.abs(x) <= (87 if k.bits == 32 else 708), (2.0, 2.0), 2**-14, 87),
    Function("log2", np.log2, lambda x, k: _normal(x, k) & (x > 0), (4.0, 4.0), 2**-12, 2**12),
    Function("reciprocal", _one_over, lambda x, k: _normal(x, k) & (np.abs(x) <= 1 / k.tiny / 2), (3.0, 1.0), 1, 4),
    Function("tanh", np.tanh, lambda x, k: x == x, (7.0, 3.0), 2**-13, 10),
    Function("small_tanh", np.tanh, lambda x, k: np.abs(x) <= 0.625, (1.0, 2.0), 2**-13, 0.625),
    Function("precise_tanh", np.tanh, lambda x, k: x == x, (3.0, 3.0), 2**-13, 10),
]


def build() -> Path | None:
    """Build the library of the functions; None if that is not possible."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if cmake is None:
        return None
    configure = [cmake, "-S", str(ROOT), "-B", str(FOLDER), "-DREGARD_FUNCTIONS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, [cmake, "--build", str(FOLDER), "--target", "regard_functions"]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
    libraries = sorted(FOLDER.glob("_functions.*"))
    return libraries[0] if libraries else None


class Library:
    """The functions of one instruction set."""

    def __init__(self, path: Path, isa: str) -> None:
        self.library, self.isa = ctypes.CDLL(str(path)), isa

    def __call__(self, name: str, x: np.ndarray, result: type | None = None) -> np.ndarray:
        """Apply the function to float32 or float64 numbers; halves of conversions are uint16."""
        x, out = np.ascontiguousarray(x), np.empty(x.shape, result or x.dtype)
        suffix = "" if name.startswith(("widen", "narrow")) else "_f32" if x.dtype == np.float32 else "_f64"
        call = getattr(self.library, f"{name}{suffix}_{self.isa}")
        call(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(x.size))
        return out


def instruction_sets(path: Path) -> list[str]:
    """Return the instruction sets that the library contains and this machine supports."""
    library, supported = ctypes.CDLL(str(path)), []
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    needed = {"avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "avx2": ("avx2", "fma", "f16c")}
    for isa in ("avx512", "avx2", "baseline", "neon"):
        if hasattr(library, f"exp2_f32_{isa}") and all(flag in flags for flag in needed.get(isa, ())):
            supported.append(isa)
    return supported


def errors(libraries: list[Library], function: Function, x: np.ndarray) -> list[tuple[float, float]]:
    """Return for every library the largest error in ULP in the function's range, and where it is."""
    kind = np.finfo(x.dtype)
    x = x[function.domain(x, kind)]
    if not x.size:
        return [(0.0, 0.0)] * len(libraries)
    more, word = (np.float64, np.uint32) if x.dtype == np.float32 else (np.longdouble, np.uint64)
    worst = []
    with np.errstate(all="ignore"):
        exact = function.exact(x.astype(more))
        exponent = ~word((1 << kind.nmant) - 1)
        power = (np.abs(exact).astype(x.dtype).view(word) & exponent).view(x.dtype)
        unit = np.maximum(power * kind.eps, kind.smallest_subnormal).astype(x.dtype)
        for library in libraries:
            error = (library(function.name, x) - exact) / unit
            np.abs(error, out=error)
            error[np.isnan(error)] = np.inf
            at = int(error.argmax())
            worst.append((float(error[at]), float(x[at])))
    return worst


def all_floats(function: Function) -> Iterator[np.ndarray]:
    """All float32 numbers of the function's range, of both signs."""
    first, last = (int(np.float32(x).view(np.uint32)) for x in (function.first, function.last))
    for start in range(first, last + 1, BLOCK):
        words = np.arange(start, min(start + BLOCK, last + 1), dtype=np.uint32)
        for sign in (0, 1 << 31):
            yield (words | np.uint32(sign)).view(np.float32)


def sample(dtype: type, count: int, seed: int = 0) -> np.ndarray:
    """Return numbers of every magnitude, near integers and halves, and in the range of actual use."""
    random = np.random.default_rng(seed)
    word = np.uint32 if dtype == np.float32 else np.uint64
    bits: np.ndarray = random.integers(0, np.iinfo(word).max, count, dtype=word, endpoint=True).view(dtype)
    used = (random.standard_normal(count) * random.choice([0.01, 0.3, 1, 8, 60, 500], count)).astype(dtype)
    near: np.ndarray = (random.integers(-300, 300, count) / 2).astype(dtype)
    near = near + (random.standard_normal(count) * 1e-5).astype(dtype)
    return np.concatenate([bits, used, near])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.functions", description=__doc__)
    parser.add_argument("--isa", action="append", help="only this instruction set")
    parser.add_argument("--every", type=int, default=1, help="only every so many blocks of 2^22 numbers")
    options = parser.parse_args()
    path = build()
    if path is None:
        print("the functions cannot be built: CMake and a C++ compiler are needed")
        return 1
    isas = options.isa or instruction_sets(path)
    lines = [f"| function | {' | '.join(isas)} | allowed | float64, sampled | allowed |"]
    lines.append(f"| --- |{' ---: |' * (len(isas) + 3)}")
    good, libraries = True, [Library(path, isa) for isa in isas]
    for function in FUNCTIONS:
        worst = [(0.0, 0.0)] * len(isas)
        for n, x in enumerate(all_floats(function)):
            if n % options.every == 0:
                worst = list(map(max, worst, errors(libraries, function, x)))
        double = max(errors(libraries, function, sample(np.float64, 1 << 20)))
        good &= max(worst)[0] <= function.ulp[0] and double[0] <= function.ulp[1]
        shown = " | ".join(f"{ulp:.2f}" for ulp, _ in worst)
        lines.append(f"| `{function.name}` | {shown} | {function.ulp[0]:g} | {double[0]:.2f} | {function.ulp[1]:g} |")
        print(lines[-1], *(f"{isa} at {x:.9g}" for isa, (_, x) in zip(isas, worst, strict=True)), flush=True)
    if options.every == 1:
        new = "\n".join(["<!-- functions -->", "", *lines, "", "<!-- end of functions -->"])
        text = PAGE.read_text()
        PAGE.write_text(re.sub(r"<!-- functions -->.*?<!-- end of functions -->", lambda _: new, text, flags=re.DOTALL))
    return not good


if __name__ == "__main__":
    sys.exit(main())
