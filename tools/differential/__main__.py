"""`python -m tools.differential`: random configurations of every module and model for MINUTES from SEED."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

import torch

from tools.differential.search import FAMILIES, search
from tools.differential.ways import WAYS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.differential", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed unless given")
    parser.add_argument("--family", action="append", default=[], choices=sorted(FAMILIES), help="some families only")
    parser.add_argument("--way", action="append", default=[], choices=sorted(WAYS), help="some ways only")
    parser.add_argument("--proceed", action="store_true", help="go on after the first finding")
    parser.add_argument("--threads", type=int, default=1, help="of torch and the kernels; calls are small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"SEED={seed}", flush=True)
    started = time.monotonic()

    def progress(counts: Counter[str]) -> None:
        if sys.stderr.isatty():
            spent = (time.monotonic() - started) / 60
            print(f"\r{spent:5.1f} of {options.minutes:g} minutes, {counts.total():,} runs ", end="", file=sys.stderr)

    findings, counts = search(
        seed, 60 * options.minutes, families=options.family, ways=options.way, proceed=options.proceed,
        report=lambda finding: print(f"\n{finding}", flush=True), progress=progress,
    )  # fmt: skip
    print("\n" + "\n".join(f"{family:24} {counts[family]:8,}" for family in options.family or FAMILIES))
    print(f"{counts.total():,} runs held, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
