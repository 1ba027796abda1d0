"""The run as text: a summary for the terminal, and docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.cases import PEAK, READS
from benchmarks.measure import OURS, format_target

Run = dict[str, Any]


def results(run: Run) -> list[dict[str, Any]]:
    """All cases at all numbers of threads, the results of one case next to each other."""
    found = [case for worker in run["times"].values() for case in worker["cases"]]
    order = {name: n for n, name in enumerate(dict.fromkeys(case["name"] for case in found))}
    return sorted(found, key=lambda case: (order[case["name"]], case["threads"]))


def verdicts(run: Run) -> list[tuple[str, str, bool]]:
    """Every target: where, what was measured, and whether it is met."""
    found = []
    for case in results(run):
        where = f"{case['name']} ({case['threads']} thread{'s' * (case['threads'] > 1)})"
        if case["wrong"]:
            found.append((where, f"wrong result, so no time: {case['wrong']}", False))
        found += [(where, format_target(target) + _wanting(case, target), target["met"]) for target in case["targets"]]
        found += [(where, f"not judged, since {peer} has no time", False) for peer in case["unjudged"]]
    for threads, worker in run["times"].items():
        if worker["grid"]:
            worst = max(worker["grid"], key=lambda row: row["slower"])
            text = f"worst is {worst['slower']:.2f}x the time of the sdpa engine, at most 1.05x: {worst['case']}"
            found.append((f"grid of {len(worker['grid'])} calls ({threads} threads)", text, worst["slower"] <= 1.05))
        found += [
            (f"mask table, {row['name']}", f"{row['value']}, {row['target']}", row["met"]) for row in worker["tables"]
        ]
        for row in worker["training"]:
            if row["at_least"]:
                text = f"{row['ratio']:.2f}x {row['peer']}, at least {row['at_least']:g}x"
                found.append((f"training throughput, {row['name']}", text, row["met"]))
    for name, row in run["memory"].items():
        if "at most" in row:
            text = f"{row[OURS]:.1f} MB beyond inputs of {row['inputs']:.1f} MB, at most {row['at most']:.0f} MB"
            found.append((f"memory of {name}", text, row[OURS] <= row["at most"]))
        if "weights" in row:
            ratio = row[OURS] / row["weights"]
            found.append((f"memory of {name}", f"{ratio:.2f}x its weights, at most 1.1x", ratio <= 1.1))
        if name.startswith("table of"):
            found.append((f"memory of a mask {name}", f"{row[OURS]:.0f} MB, at most 200 MB", row[OURS] <= 200))
    return found


def _wanting(case: dict[str, Any], target: dict[str, Any]) -> str:
    """What a missed ratio would take of the machine, where its limit was measured."""
    if target["met"] or not target["at_least"] or target["peer"] in (PEAK, READS):
        return ""
    limit = next((limit for limit in (PEAK, READS) if limit in case["ratios"]), None)
    if limit is None:
        return ""
    used = case["ratios"][limit]
    return f": from {used:.0%} of {limit} to {used * target['at_least'] / target['ratio']:.0%}"


def absent(run: Run) -> dict[str, str]:
    """Peers without a time, and why."""
    return {peer: why for case in results(run) for peer, why in case["missing"].items()}


def summary(run: Run) -> str:
    judged = verdicts(run)
    missed = [f"  missed  {where}: {what}" for where, what, met in judged if not met]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets met in {run['seconds']:.0f} s", *missed]
    return "\n".join(lines + [f"  left out  {peer}: {why}" for peer, why in absent(run).items()])


def markdown(run: Run, picture: str) -> str:
    judged = verdicts(run)
    missed = [(where, what) for where, what, met in judged if not met]
    peaks = "; ".join(
        f"{n} thread{'s' * (int(n) > 1)}: {w['peak']:.0f} GFLOP/s {run['peak name']}, reads {w['cache']:.0f} GB/s "
        f"of 16 MB and {w['memory']:.0f} GB/s of 256 MB"
        for n, w in run["times"].items()
    )
    machine = run["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine.items() if name not in ("cpu", "system"))
    clock = "CPU seconds, since the machine was busy" if run["cpu time"] else "wall clock"
    parts = [
        "# Benchmarks\n",
        "Written by `make bench`; do not edit. All competitors of a case take turns in one process, each number is "
        "the best of many rounds, and a competitor is timed only after its output, and its gradients where it trains, "
        "agree with the definition in float64. Up to 64 MB that one frees stay with the process, as the C library has "
        "it once a block of 32 MB was freed.\n",
        f"| | |\n| --- | --- |\n| command | `{run['command']}` |"
        f"\n| date | {run['date']}, {run['seconds'] / 60:.0f} minutes |"
        f"\n| machine | {machine['cpu']}, {machine['system']} |\n| measured | {peaks} |\n| clock | {clock} |\n"
        f"| versions | {versions} |\n",
        f"![Peer time divided by ours]({picture})\n",
        f"## Targets: {len(judged) - len(missed)} of {len(judged)} met\n",
        "Missed:\n" if missed else "None is missed.\n",
        *(f"- {where}: {what}" for where, what in missed),
        "\n## Cases\n",
        "Ratios are peer time / our time: above 1 we are faster. Shapes are (B, H, N, D) = (1, 8, N, 64) in float32, "
        "with fewer heads for additive, sparse and linear attention and where N is 8,192 or more. Memory is what a "
        "call takes beyond its inputs at its peak, at 1 thread, ours and the first peer's. **Bold** ratios have a "
        "target that is met, ~~struck~~ ones a target that is missed.\n",
        *_cases(run),
        *_training(run),
        *_growth(run),
        *_grid(run),
    ]
    if left_out := absent(run):
        parts += ["\n## Left out\n", *(f"- {peer}: {why}" for peer, why in left_out.items())]
    return "\n".join(parts).rstrip() + "\n"


def _cases(run: Run) -> Iterator[str]:
    yield "| case | threads | ours | peer time / ours | of peak | memory | target |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for case in results(run):
        if case["wrong"]:
            yield f"| {case['name']} | {case['threads']} | | wrong result: {case['wrong']} | | | |"
            continue
        met = {target["peer"]: target["met"] for target in case["targets"]}
        ratios = [
            _marked(f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x", met.get(peer)) + f" {peer}"
            for peer, ratio in case["ratios"].items()
            if peer not in (PEAK, READS)
        ]
        peaks = [_marked(f"{r:.0%}", met.get(p)) + f" {p}" for p, r in case["ratios"].items() if p in (PEAK, READS)]
        yield (
            f"| {case['name']} | {case['threads']} | {_time(case['seconds'])} | {', '.join(ratios)} "
            f"| {', '.join(peaks)} | {_memory(run['memory'].get(case['name']))} | {_targets(case['targets'])} |"
        )


def _marked(text: str, met: bool | None) -> str:
    return text if met is None else f"**{text}**" if met else f"~~{text}~~"


def _targets(targets: list[dict[str, Any]]) -> str:
    shown = []
    for target in targets:
        bound = f">= {target['at_least']:g}x" if target["at_least"] else f"<= {target['at_most']:g}x time of"
        if target["peer"] in (PEAK, READS):
            bound = f">= {target['at_least']:.0%}"
        shown.append(f"{bound} {target['peer']}: {'met' if target['met'] else 'MISSED'}")
    return "; ".join(shown)


def _memory(row: dict[str, float] | None) -> str:
    if row is None:
        return ""
    return ", ".join(
        f"{size:,.0f} MB" + ("" if name == OURS else f" {name}")
        for name, size in row.items()
        if name not in ("inputs", "at most")
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _training(run: Run) -> Iterator[str]:
    rows = [(threads, row) for threads, worker in run["times"].items() for row in worker["training"]]
    if not rows:
        return
    yield "\n## Training throughput\n"
    yield (
        "Whole steps with dropout 0.1: forward, backward, clipping and AdamW, from the same weights on the same "
        "sentences in turns. Tokens are real ones: the peer pads its batches, ours are packed.\n"
    )
    yield "| model | threads | ours, tokens/s | peer, tokens/s | ratio | target |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for threads, row in rows:
        aim = "" if row["at_least"] is None else f">= {row['at_least']:g}x: {'met' if row['met'] else 'MISSED'}"
        yield (
            f"| {row['name']} | {threads} | {row['ours']:,.0f} | {row['theirs']:,.0f} {row['peer']} "
            f"| {row['ratio']:.2f}x | {aim} |"
        )


def _growth(run: Run) -> Iterator[str]:
    rows = [row for worker in run["times"].values() for row in worker["growth"]]
    if not rows:
        return
    yield "\n## Growth over N, by mask\n"
    yield (
        f"Time of a forward call, (1, 2, N, 64), from N = {rows[0]['lengths'][0]:,} to {rows[0]['lengths'][-1]:,}: "
        "time goes like N to this power over the last two doublings, and so does the work in the tiles visited. The "
        "first call with a mask also finds its tiles, in the time given for the longest N.\n"
    )
    yield "| mask | threads | time ~ N^ | work ~ N^ | at the longest N | finding the tiles | engine |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        yield (
            f"| {row['pattern']} | {row['threads']} | {row['exponent']:.2f} | {row['work']:.2f} "
            f"| {_time(row['seconds'][-1])} | {_time(max(0.0, row['first']))} | {row['engine']} |"
        )


def _grid(run: Run) -> Iterator[str]:
    rows = [row for worker in run["times"].values() for row in worker["grid"]]
    if not rows:
        return
    yield "\n## No call slower than torch's kernel\n"
    yield (
        f"{len(rows)} calls: shapes (B, H, G, Q, K, D), plain, causal and padded, forward and with backward. Time of "
        "the engine that selection takes / time of the sdpa engine; the ten worst, of which none should exceed 1.05.\n"
    )
    yield "| call | threads | ours / sdpa | ours | engine |\n| --- | --- | --- | --- | --- |"
    for row in sorted(rows, key=lambda row: -row["slower"])[:10]:
        yield f"| {row['case']} | {row['threads']} | {row['slower']:.2f} | {_time(row['seconds'])} | {row['engine']} |"
    for row in rows:
        if not row["agree"]:
            yield f"\nThe engines disagree: {row['case']}."
