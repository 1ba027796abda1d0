"""Measure every claim of the lab with many seeds, and write which verdicts differ: `make lab-seeds`.

    python -m tools.lab_seeds                         100 seeds of every claim; takes hours, and resumes if stopped
    python -m tools.lab_seeds --most-seconds 2        only claims whose measurement takes at most 2 seconds
    python -m tools.lab_seeds --minutes 20            stop after 20 minutes
    python -m tools.lab_seeds --untimed               without the claims whose times are judged, if other jobs run
    python -m tools.lab_seeds --write                 only write the page, from docs/lab_seeds.json

A seed is a whole measurement, with all its repetitions, which use seeds that no other seed uses. Verdicts of a claim
are dropped when a criterion, the code of its measurement or a module of the lab that it imports changes. Claims whose
times are judged are measured again, not resampled. Results are written after every pass over the claims and every
minute. Several processes can work on different claims at the same time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from regard.files import write_text_atomically
from regard.lab import CLAIMS, Claim, measure
from regard.lab.criteria import Criterion, decide, mean_interval, median_interval

KEPT, PAGE = Path("docs/lab_seeds.json"), Path("docs/lab_seeds.md")
HEAD = """# Verdicts over seeds

How often each verdict of the [lab](lab.md) was reached, over whole measurements with different seeds. *Repetitions* is
how many measurements, each with a seed of its own, one verdict rests on; 1 where nothing is random, or where rounds of
timings are repeated within the measurement. Timings are measured anew for every seed. `make lab-seeds` continues to
100 seeds of every claim; the table says how many there are so far. A dash is a claim that has been measured with no
seed but that of [the lab](lab.md#the-claims).

{summary}

| claim | seeds | repetitions | verdicts | flips |
| --- | --- | --- | --- | --- |
"""


def fingerprint(claim: Claim) -> str:
    """Return a digest of what a verdict depends on: code of the measurement and the lab, repetitions and criteria."""
    code = claim.code()
    names = set(re.findall(r"from regard\.lab\.(\w+) import|from regard\.lab import (\w+)", code))
    modules = [importlib.import_module(f"regard.lab.{''.join(pair)}") for pair in sorted(names)]
    parts: list[Any] = [*modules, Criterion, decide, mean_interval, median_interval]
    sources = [inspect.getsource(part) for part in parts]
    required = [(each.key, each.low, each.high, each.rule, each.part, each.width) for each in claim.criteria]
    return hashlib.sha256(f"{code}{claim.repetitions}{required}{sources}".encode()).hexdigest()[:16]


def judges_times(claim: Claim) -> bool:
    """Return whether a criterion of the claim is about a time."""
    return any(criterion.rule == "interval" for criterion in claim.criteria)


def load() -> dict[str, Any]:
    """Return the kept verdicts by claim, without those whose measurement or criteria have changed."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    empty: dict[str, Any] = {
        name: {"code": fingerprint(claim), "verdicts": {}, "seconds": None} for name, claim in CLAIMS.items()
    }
    return {
        name: kept[name] if kept.get(name, {}).get("code") == each["code"] else each for name, each in empty.items()
    }


def flips(entry: dict[str, Any]) -> int:
    """Return how many verdicts differ from the most frequent one."""
    counts = Counter(entry["verdicts"].values())
    return sum(counts.values()) - max(counts.values(), default=0)


def write(kept: dict[str, Any]) -> None:
    """Write the verdicts and the page, with the verdicts that other processes have written since."""
    for name, entry in load().items():
        kept[name]["verdicts"] = entry["verdicts"] | kept[name]["verdicts"]
    lines = []
    for name, entry in kept.items():
        counts = Counter(entry["verdicts"].values()).most_common()
        verdicts = ", ".join(f"{verdict} ({count})" for verdict, count in counts) or "–"
        others = flips(entry) if counts else "–"
        lines.append(f"| `{name}` | {len(entry['verdicts'])} | {CLAIMS[name].repetitions} | {verdicts} | {others} |")
    seeds = [len(entry["verdicts"]) for entry in kept.values()]
    full, none = sum(count >= 100 for count in seeds), seeds.count(0)
    summary = (
        f"{len(kept)} claims: {full} with 100 seeds, {len(kept) - full - none} with fewer, {none} with none so far; "
        f"{sum(seeds):,} measurements, {sum(map(flips, kept.values()))} flips."
    )
    write_text_atomically(KEPT, json.dumps(kept, indent=1, sort_keys=True) + "\n")
    write_text_atomically(PAGE, HEAD.format(summary=summary) + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLAIM")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--most-seconds", type=float, default=float("inf"))
    parser.add_argument("--untimed", action="store_true", help="without claims whose times are judged")
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args()
    kept, written = load(), time.monotonic()
    stop = written + 60 * options.minutes
    names = [name for name in options.names or CLAIMS if not (options.untimed and judges_times(CLAIMS[name]))]
    for seed in range(0 if options.write else options.seeds):
        for name in names:
            entry = kept[name]
            expensive = entry["seconds"] is not None and entry["seconds"] > options.most_seconds
            if str(seed) in entry["verdicts"] or expensive or time.monotonic() > stop:
                continue
            result = measure(CLAIMS[name], seed=seed)
            entry["verdicts"][str(seed)], entry["seconds"] = result.verdict.value, round(result.cpu_seconds, 2)
            if time.monotonic() > written + 60:
                write(kept)
                written = time.monotonic()
        write(kept)
    write(kept)


if __name__ == "__main__":
    main()
