"""Fuzzing: `make fuzz` draws random calls for MINUTES from SEED, for every instruction set of this machine.

Each instruction set runs in its own processes, once with the installed library and once with a sanitizer build, so that
a crash is detected and the call that caused it is known. A failure is shrunk to the smallest call that still fails.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from tools.sanitize import build, environment, instruction_sets, sanitizer_report

PAGE = Path("docs/fuzzing.md")
PROCESS_SECONDS = 60.0
CALLS_PER_SEED = 40
OPENMP = {"OMP_WAIT_POLICY": "passive"}  # idle threads leave the cores to other processes
ENGINES = (None, "native", "native", "native", "tiled", "sdpa")


def fuzz(seed: int, seconds: float, journal: Path) -> int:
    """Draw calls from seed, seed + 1, ... until the time is over; the journal contains the current call."""
    import warnings

    import hypothesis
    import torch
    from tests.hostile import check
    from tests.strategies import Hostile, hostile

    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills the memory of torch.empty with NaN
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    settings = hypothesis.settings(
        max_examples=CALLS_PER_SEED, database=None, deadline=None, phases=phases, print_blob=True,
        report_multiple_bugs=False, suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    @settings
    @hypothesis.given(case=hostile(ENGINES))
    def run(case: Hostile) -> None:
        journal.write_text(json.dumps({"seed": seed, "call": repr(case), "counts": counts}))
        counts[f"{check(case)} {str(case.dtype).removeprefix('torch.')}"] += 1

    while True:
        hypothesis.seed(seed)(run)()
        seed += 1
        if time.monotonic() > end:
            break
    journal.write_text(json.dumps({"seed": seed, "call": None, "counts": counts}))
    return 0


def run_process(
    name: str, variables: dict[str, str], seed: int, seconds: float, journal: Path
) -> tuple[Counter[str], str]:
    """Run one process; return its number of calls by engine and dtype, and the report of a failure or ""."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tools.fuzz", "--seed", str(seed)]
    result = subprocess.run(
        [*command, "--journal", str(journal), "--seconds", str(seconds)],
        env=os.environ | OPENMP | variables, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    last: dict[str, Any] = {"seed": seed, "call": "none yet", "counts": {}}
    if journal.exists():
        last = json.loads(journal.read_text())
    counts: Counter[str] = Counter(last["counts"])
    if not result.returncode:
        return counts, ""
    settings = " ".join(f"{name}={value!r}" for name, value in variables.items())
    return counts, (
        f"{name}, exit code {result.returncode}, the last call (seed {last['seed']}):\n{last['call']}\n"
        f"{result.stdout[-6000:]}\n{sanitizer_report(result.stderr) or result.stderr[-6000:]}\n"
        f"To repeat it: {settings} python -m tools.fuzz --journal journal --seconds 0 --seed {last['seed']}"
    )


def run_all(builds: dict[str, dict[str, str]], seed: int, seconds: float) -> tuple[dict[str, Counter[str]], str]:
    """Run processes of all builds until the time is over or one fails; return the counts and the failure."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in builds}
    seeds = Random(seed)  # processes draw their seeds, so that runs with neighbouring seeds differ
    started, cores = time.monotonic(), min(len(builds), os.cpu_count() or 1)
    processes_per_core = -(-len(builds) // cores)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        while (left := seconds - (time.monotonic() - started)) > 0:
            jobs = {}
            for name, variables in builds.items():
                seconds_each = min(left / processes_per_core, PROCESS_SECONDS)
                first = seeds.randrange(2**31)
                jobs[name] = pool.submit(run_process, name, variables, first, seconds_each, Path(folder) / name)
            for name, job in jobs.items():
                calls, failure = job.result()
                counts[name] += calls
                if failure:
                    return counts, failure
            total, spent = sum(sum(c.values()) for c in counts.values()), time.monotonic() - started
            print(f"\r{spent / 60:5.1f} of {seconds / 60:g} minutes, {total:,} calls ", end="", flush=True)
    print()
    return counts, ""


def page(counts: dict[str, Counter[str]], failure: str, minutes: float, seed: int) -> str:
    """Return the summary in Markdown."""
    kinds = sorted({kind for counter in counts.values() for kind in counter})
    total = sum(sum(counter.values()) for counter in counts.values())
    lines = [
        "# Fuzzing",
        "",
        "Random calls with odd, tiny, empty and large sizes; every score, mask, bias, sink, dropout and offset; all",
        "kinds of strides; NaN, infinities, huge and denormal numbers in visible and in masked places. Each call runs",
        "forward and backward, with statistics and maps, and is compared with a float64 definition that uses none of",
        "the library's code. A failure is a result outside [the rounding bound](inside/rounding.md), a second call",
        "with different bits, a crash, or the report of a sanitizer. Uninitialised memory is filled with NaN.",
        "",
        f"    make fuzz MINUTES={minutes:g} SEED={seed}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}: {total:,} calls, {'one failed' if failure else 'none failed'}.",
        "",
        f"| engine and dtype | {' | '.join(counts)} |",
        f"| --- |{' ---: |' * len(counts)}",
    ]
    lines += [f"| {kind} | {' | '.join(f'{counter[kind]:,}' for counter in counts.values())} |" for kind in kinds]
    lines += [f"| all | {' | '.join(f'{sum(counter.values()):,}' for counter in counts.values())} |"]
    if failure:
        lines += ["", "The failure:", "", *(f"    {line}".rstrip() for line in failure.splitlines()[:40])]
    return "\n".join(lines) + "\n"


def sections(text: str) -> str:
    """Return the sections of a page, which a new summary keeps."""
    return text[text.index("\n## ") :] if "\n## " in text else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="random by default, and printed")
    parser.add_argument("--plain", action="store_true", help="without the sanitizer build")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    if arguments.journal is not None:
        return fuzz(seed, arguments.seconds, arguments.journal)

    from regard.engines import native

    if reason := native.why_missing():
        print(f"nothing to fuzz: {reason}")
        return 1
    library = native.build_info()["native"]
    isas = instruction_sets(library)
    builds = {isa: {"REGARD_ISA": isa, "REGARD_LIBRARY": library} for isa in isas}
    if not arguments.plain:
        sanitizers = environment(build(isas))
        builds |= {f"{isa}, sanitizers": {"REGARD_ISA": isa, **sanitizers} for isa in isas}
    print(f"SEED={seed}")
    counts, failure = run_all(builds, seed, arguments.minutes * 60)
    history = sections(arguments.page.read_text()) if arguments.page.exists() else ""
    arguments.page.write_text(page(counts, failure, arguments.minutes, seed) + history)
    print(failure or f"no failures; {arguments.page} has the counts")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
