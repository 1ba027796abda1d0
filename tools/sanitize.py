"""The kernels under the address and undefined-behaviour sanitizers: `make sanitize` builds them and runs their tests.

The sanitizers' allocator must be loaded before Python's, so the tests run in a separate process. Leaks are not checked,
because Python and torch keep memory until they exit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/sanitize")
ENGINE = (
    "native", "registration", "safety", "processes", "agreement", "inspection", "packed_linear", "packed_call",
    "weight_formats",
)  # fmt: skip
TESTS = [f"tests/engines/test_{name}.py" for name in ENGINE]
TESTS += ["tests/linear", "tests/nn/test_fused_stack.py", "tests/test_quantized.py"]
WHOLE = ("packed_linear", "packed_call", "weight_formats", "fused_stack", "quantized")  # files of which all tests run
KERNELS = " or ".join(("native", "registration", "safety", "processes", "inspection", "kernel", *WHOLE))
PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("regard_isa", "regard_isas_compiled"):
    call = getattr(library, name)
    call.restype = ctypes.c_char_p
    print(call().decode())
"""


def instruction_sets(library: str) -> list[str]:
    """Return the instruction sets that the library contains and this machine supports."""

    def probe(isa: str) -> list[str]:
        result = subprocess.run(
            [sys.executable, "-c", PROBE, library], capture_output=True, text=True, check=True,
            env={**os.environ, "REGARD_ISA": isa},
        )  # fmt: skip
        return result.stdout.splitlines()

    return [isa for isa in probe("")[1].split() if probe(isa)[0] == isa]


def build(isas: list[str], folder: Path = FOLDER) -> Path:
    configure = ["cmake", "-G", "Ninja", "-S", ".", "-B", str(folder), "-DREGARD_SANITIZE=ON"]
    subprocess.run([*configure, f"-DREGARD_ISAS={';'.join(isas)}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True)
    return folder.resolve() / "_native.so"


def environment(library: Path) -> dict[str, str]:
    """Return the environment variables that a process needs to load a sanitizer build."""

    def runtime(name: str) -> str:
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",  # exceptions of torch need both
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "REGARD_LIBRARY": str(library),
        "REGARD_EXAMPLES": "300",  # random calls per test: sanitizers make kernels several times slower
    }


def sanitizer_report(stderr: str) -> str:
    """Return the report of a sanitizer without the frames of Python, or "" if there is none."""
    lines = stderr.splitlines()
    first = [n for n, line in enumerate(lines) if "AddressSanitizer" in line or "runtime error:" in line]
    kept = lines[first[0] :] if first else []
    return "\n".join([line for line in kept if "Python/" not in line and "Objects/" not in line][:40])


def main() -> int:
    from regard.engines import native

    if reason := native.why_missing():
        print(f"no sanitizer run: {reason}")
        return 1
    library = build(instruction_sets(native.build_info()["native"]))
    # With pytest's default capture, the report of a sanitizer is lost when it ends the process.
    command = [sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", "-n", "2", *TESTS]
    command += ["-k", KERNELS, *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **environment(library)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
