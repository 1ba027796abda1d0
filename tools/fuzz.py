"""Hostile calls without end: `make fuzz` draws them for MINUTES from SEED, on every instruction set of this machine.

Each instruction set has processes of its own, with the library as installed and with one built with sanitizers; so a
crash is seen, and the call that made it is known. A failure is shrunk to the smallest call that still fails.
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

from tools.sanitize import build, environment, instruction_sets, report

PAGE = Path("docs/fuzzing.md")
SLICE = 60.0  # seconds in one process
ROUND = 40  # calls from one seed
PATIENT = {"OMP_WAIT_POLICY": "passive"}  # threads that wait leave the cores to those that work
ENGINES = (None, "native", "native", "native", "tiled", "sdpa")


def work(seed: int, seconds: float, journal: Path) -> int:
    """Draws rounds of calls from seed, seed + 1, ... until the time is over; the journal holds the call in hand."""
    import warnings

    import hypothesis
    import torch
    from tests.hostile import check
    from tests.strategies import Hostile, hostile

    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty gives is then full of NaN
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    quiet = hypothesis.settings(
        max_examples=ROUND, database=None, deadline=None, phases=phases, print_blob=True, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    @quiet
    @hypothesis.given(case=hostile(ENGINES))
    def one(case: Hostile) -> None:
        journal.write_text(json.dumps({"seed": seed, "call": repr(case), "counts": counts}))
        counts[f"{check(case)} {str(case.dtype).removeprefix('torch.')}"] += 1

    while True:
        hypothesis.seed(seed)(one)()
        seed += 1
        if time.monotonic() > end:
            break
    journal.write_text(json.dumps({"seed": seed, "call": None, "counts": counts}))
    return 0


def turn(place: str, variables: dict[str, str], seed: int, seconds: float, journal: Path) -> tuple[Counter[str], str]:
    """One process: how many calls it made, and what it found."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tools.fuzz", "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--journal", str(journal), "--seconds", str(seconds)],
        env=os.environ | PATIENT | variables, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    last = json.loads(journal.read_text()) if journal.exists() else {"seed": seed, "call": "none yet", "counts": {}}
    if not done.returncode:
        return Counter(last["counts"]), ""
    again = " ".join(f"{name}={value!r}" for name, value in variables.items())
    return Counter(last["counts"]), (
        f"{place}, exit code {done.returncode}, the last call (seed {last['seed']}):\n{last['call']}\n"
        f"{done.stdout[-6000:]}\n{report(done.stderr) or done.stderr[-6000:]}\n"
        f"Again: {again} python -m tools.fuzz --journal journal --seconds 0 --seed {last['seed']}"
    )


def turns(places: dict[str, dict[str, str]], seed: int, seconds: float) -> tuple[dict[str, Counter[str]], str]:
    """Turns of all places until the time is over or something is found; counts, and what was found."""
    counts: dict[str, Counter[str]] = {place: Counter() for place in places}
    seeds = Random(seed)  # those of turns are drawn, so that runs with neighbouring seeds make other calls
    started, cores = time.monotonic(), min(len(places), os.cpu_count() or 1)
    together = -(-len(places) // cores)  # processes that a core runs in one turn of all
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        while (left := seconds - (time.monotonic() - started)) > 0:
            jobs = {}
            for place, variables in places.items():
                journal = Path(folder) / place
                first = seeds.randrange(2**31)
                jobs[place] = pool.submit(turn, place, variables, first, min(left / together, SLICE), journal)
            for place, job in jobs.items():
                done, found = job.result()
                counts[place] += done
                if found:
                    return counts, found
            total, spent = sum(sum(c.values()) for c in counts.values()), time.monotonic() - started
            print(f"\r{spent / 60:5.1f} of {seconds / 60:g} minutes, {total:,} calls ", end="", flush=True)
    print()
    return counts, ""


def page(counts: dict[str, Counter[str]], found: str, minutes: float, seed: int) -> str:
    """The summary, in Markdown."""
    kinds = sorted({kind for counter in counts.values() for kind in counter})
    total = sum(sum(counter.values()) for counter in counts.values())
    lines = [
        "# Fuzzing",
        "",
        "Random calls (sizes odd, tiny, empty and large; every score, mask, bias, sink, dropout and offset; strides of",
        "all kinds; NaN, infinities, huge and denormal numbers where they may and may not be seen), forward, backward,",
        "statistics and maps. The exact result comes from a definition in float64 torch that calls nothing of the",
        "library. A finding is a result farther from it than rounding can explain ([the bound](inside/rounding.md)),",
        "other bits in a second call, a crash, or a report of a sanitizer. Uninitialised memory is full of NaN.",
        "",
        f"    make fuzz MINUTES={minutes:g} SEED={seed}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}: {total:,} calls, {'one failed' if found else 'none failed'}.",
        "",
        f"| engine and dtype | {' | '.join(counts)} |",
        f"| --- |{' ---: |' * len(counts)}",
    ]
    lines += [f"| {kind} | {' | '.join(f'{counter[kind]:,}' for counter in counts.values())} |" for kind in kinds]
    lines += [f"| all | {' | '.join(f'{sum(counter.values()):,}' for counter in counts.values())} |"]
    if found:
        lines += ["", "Found:", "", *(f"    {line}".rstrip() for line in found.splitlines()[:40])]
    return "\n".join(lines) + "\n"


def earlier(text: str) -> str:
    """What a page says of earlier runs, from its first section on."""
    return text[text.index("\n## ") :] if "\n## " in text else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if left out")
    parser.add_argument("--plain", action="store_true", help="without the build with sanitizers")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    if asked.journal is not None:
        return work(seed, asked.seconds, asked.journal)

    from regard.engines import native

    if reason := native.why_missing():
        print(f"nothing to fuzz: {reason}")
        return 1
    library = native.build_info()["native"]
    isas = instruction_sets(library)
    places = {isa: {"REGARD_ISA": isa, "REGARD_LIBRARY": library} for isa in isas}
    if not asked.plain:
        watched = environment(build(isas))
        places |= {f"{isa}, sanitizers": {"REGARD_ISA": isa, **watched} for isa in isas}
    print(f"SEED={seed}")
    counts, found = turns(places, seed, asked.minutes * 60)
    history = earlier(asked.page.read_text()) if asked.page.exists() else ""
    asked.page.write_text(page(counts, found, asked.minutes, seed) + history)
    print(found or f"nothing found; {asked.page} has the counts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
