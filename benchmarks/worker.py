"""One process of the run: all cases at one number of threads, or their memory. `run` starts it."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import extras, machine, timing
from benchmarks.case import Case
from benchmarks.cases import cases
from benchmarks.measure import OURS, calls_of, measure
from benchmarks.random_calls import random_calls
from benchmarks.training import training

_COMPILED = ("compile", "FlexAttention")


def chosen(quick: bool, only: str, threads: int = 0) -> list[Case]:
    """The requested cases; given a number of threads, those that are measured with it."""
    return [
        case
        for case in cases()
        if (case.quick or not quick)
        and only.lower() in f"{case.row} {case.name}".lower()
        and (not threads or case.threads in (0, threads))
    ]


def report(line: str) -> None:
    print(line, flush=True)


def times(threads: int, quick: bool, only: str, budget: float) -> dict[str, Any]:
    torch.set_num_threads(threads)
    results: dict[str, Any] = {"cases": [], "growth": [], "grid": [], "random": [], "tables": [], "training": []}
    todo = chosen(quick, only, threads)
    for number, case in enumerate(todo, 1):
        start = time.perf_counter()
        result = measure(case, threads, budget)
        results["cases"].append(asdict(result))
        report(f"  [{number}/{len(todo)}, {threads} threads, {time.perf_counter() - start:.0f} s] {result.line()}")
        gc.collect()
    for name, parts in (("growth", extras.growth), ("grid", extras.grid), ("random", random_calls)):
        if only.lower() in name:
            results[name] = extras.run_parts(parts(threads, quick), lambda line, name=name: report(f"  {name}: {line}"))
    if only.lower() in "mask tables":
        results["tables"] = extras.run_parts(extras.mask_tables(quick), lambda line: report(f"  mask tables: {line}"))
    if only.lower() in "training throughput" and threads == 2:
        results["training"] = extras.run_parts(training(quick), lambda line: report(f"  training throughput: {line}"))
    call, flops = machine.peak_call(threads)
    results["peak"] = flops / timing.time_interleaved({"": call}, 0.3)[""] / 1e9
    for name, count in (("cache", 1 << 22), ("memory", 1 << 26)):
        data = torch.zeros(count)
        results[name] = 4 * count / timing.time_interleaved({"": machine.read_call([data], threads)}, 0.3)[""] / 1e9
    return results


def memory(quick: bool, only: str) -> dict[str, Any]:
    """Megabytes beyond inputs that each case takes at its peak: ours, and the first peer where that is quick enough."""
    torch.set_num_threads(1)
    peaks: dict[str, Any] = {}
    for case in chosen(quick, only):
        if case.smallest or (quick and not case.linear_memory):
            continue
        long = max(t.shape[-2] for t in case.inputs().values() if t.dim() > 1) > 8192
        kept = (
            () if long else tuple(peer for peer in case.peers[:1] if not any(word in peer.name for word in _COMPILED))
        )
        calls, x, result = calls_of(Case(**(vars(case) | {"peers": kept})), 1)
        if result.wrong:
            continue
        peaks[case.name] = {name: peak_megabytes(call) for name, call in calls.items()}
        given = sum(t.numel() * t.element_size() for t in x.values()) / 1e6
        peaks[case.name]["inputs"] = given
        if case.linear_memory:
            peaks[case.name]["at most"] = max(16.0, 8 * given)
        report(f"  memory of {case.name}: {peaks[case.name][OURS]:.0f} MB")
        calls.clear()
        gc.collect()
    if only.lower() in "mask tables":
        peaks["table of 1,048,576 keys"] = {OURS: peak_megabytes(extras.million_keys())}
    if only.lower() in "frozen model":
        build = extras.frozen_model()
        gc.collect()
        before = _status("VmRSS")
        model = build()
        gc.collect()
        resident, weights = (_status("VmRSS") - before) / 1e3, sum(each.nbytes for each in model.parameters()) / 1e6
        peaks["a frozen model"] = {OURS: resident, "weights": weights}
        report(f"  memory of a frozen model: {resident:.0f} MB, {resident / weights:.2f}x its weights")
    return peaks


def peak_megabytes(call: Any) -> float:
    """How far the resident memory of this process rises during a call; Linux only."""
    call()
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    except OSError:
        return float("nan")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before) / 1e3


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("times", "memory"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.cpu_time:
        timing.use_cpu_time()
    if given.what == "times":
        report = times(given.threads, given.quick, given.only, given.budget)
    else:
        report = memory(given.quick, given.only)
    given.out.write_text(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
