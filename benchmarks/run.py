"""Measure everything and write the report: `python -m benchmarks.run`.

    python -m benchmarks.run                      all cases at 1 and 2 threads, writes docs/benchmarks.md and .png
    python -m benchmarks.run --quick              a part of them at 1 thread, in two minutes; writes nothing
    python -m benchmarks.run --only window        the cases whose name or row has this in it; writes nothing

Each number of threads has its own process, since some libraries fix theirs when they start; within it all
competitors take turns. There the C library keeps freed memory as it does once a block of 32 MB was freed: otherwise
chance decides whether a call has to map its pages again, which takes up to a third of a short one. Memory is measured
in another process, where freed memory is returned to the system at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import figures, machine, picture, report

ROOT = Path(__file__).parents[1]


def worker(what: str, folder: Path, arguments: list[str], threads: int) -> dict[str, Any]:
    """Run one process, let it print, and return what it found."""
    out = folder / f"{what}-{threads}.json"
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PJRT_NPROC": str(threads),  # JAX
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'}",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if what == "memory":
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    else:
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
    command = [sys.executable, "-m", "benchmarks.worker", what, str(out), "--threads", str(threads), *arguments]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the cases, short rounds, 1 thread")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads (default: 1 2; with --quick: 1)")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name or row contains NAME")
    parser.add_argument("--out", type=Path, help="the report (default: docs/benchmarks.md for a whole run)")
    parser.add_argument("--budget", type=float, help="seconds of taking turns in each case (default: 3; quick: 0.5)")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for 1 thread on a busy machine")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    parser.add_argument("--no-memory", action="store_true", help="leave out the measurement of memory")
    given = parser.parse_args()
    threads = given.threads or ([1] if given.quick else [1, 2])
    if given.cpu_time and threads != [1]:
        parser.error("--cpu-time counts the seconds of all threads together: use it with --threads 1")
    whole = not given.quick and not given.only
    out = given.out or (ROOT / "docs" / "benchmarks.md" if whole else None)
    budget = given.budget or (0.5 if given.quick else 3.0)
    arguments = ["--only", given.only, *(["--quick"] if given.quick else [])]
    timed = [*arguments, "--budget", str(budget), *(["--cpu-time"] if given.cpu_time else [])]

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        times = {n: worker("times", Path(folder), timed, n) for n in threads}
        memory = {} if given.no_memory else worker("memory", Path(folder), arguments, 1)
    run = {
        "command": f"python -m benchmarks.run {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(),
        "peak name": machine.peak_name(),
        "cpu time": given.cpu_time,
        "times": times,
        "memory": memory,
        "seconds": time.perf_counter() - start,
    }
    print("\n" + report.summary(run))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        picture.draw(run, out.with_suffix(".png"))
        out.write_text(report.markdown(run, out.with_suffix(".png").name))
        if given.json is not None:
            given.json.write_text(json.dumps(run))
        print(f"wrote {out} and {out.with_suffix('.png')}")
        if given.out is None:
            figures.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
