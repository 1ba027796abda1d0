"""The kernels under the address and undefined-behaviour sanitizers: `make sanitize` builds them and runs their tests.

The sanitizers' allocator must be there before Python's own, so that the tests run in a process of their own. Leaks are
not looked for: Python and torch keep much until the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/sanitize")
ENGINE = ("native", "registration", "safety", "agreement", "inspection", "packed_linear")
TESTS = [f"tests/engines/test_{name}.py" for name in ENGINE]
TESTS += ["tests/test_linear.py", "tests/test_linear_kernel.py"]
PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("regard_isa", "regard_isas_compiled"):
    call = getattr(library, name)
    call.restype = ctypes.c_char_p
    print(call().decode())
"""


def instruction_sets(library: str) -> list[str]:
    """Those that the library has and this machine can run."""

    def ask(isa: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, library], capture_output=True, text=True, check=True,
            env={**os.environ, "REGARD_ISA": isa},
        )  # fmt: skip
        return done.stdout.splitlines()

    return [isa for isa in ask("")[1].split() if ask(isa)[0] == isa]


def build(isas: list[str], folder: Path = FOLDER) -> Path:
    configure = ["cmake", "-G", "Ninja", "-S", ".", "-B", str(folder), "-DREGARD_SANITIZE=ON"]
    subprocess.run([*configure, f"-DREGARD_ISAS={';'.join(isas)}"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True)
    return folder.resolve() / "_native.so"


def environment(library: Path) -> dict[str, str]:
    """What a process needs to load a library that was built with the sanitizers."""

    def runtime(name: str) -> str:
        asked = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",  # where torch throws, the former needs both
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "REGARD_LIBRARY": str(library),
        "REGARD_EXAMPLES": "300",  # of the random calls: kernels with sanitizers are several times slower
    }


def report(stderr: str) -> str:
    """What a sanitizer said among other things, without the frames of Python; nothing if none did."""
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
    # What a sanitizer writes before it ends the process is lost where pytest holds back the file itself.
    command = [sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", "-n", "2", *TESTS]
    command += ["-k", "native or registration or safety or inspection or packed_linear or kernel", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, **environment(library)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
