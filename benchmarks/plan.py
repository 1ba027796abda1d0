"""Compare the predictions of `regard plan` with measured memory, bytes and times of real steps.

    python -m benchmarks.plan --cores 2

Each layout is run by processes of its own, of one thread each, which measure their speeds between the steps. Memory is
the peak of a process over what it held before there was a model. Bytes are those that went over the loopback device, in
a network namespace of their own where the system lets us make one. Seconds are those that a process computes, which
others on the machine do not stretch; with --wall also those that pass, for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regard.cli.plan_report import format_quantity
from regard.distributed import traffic
from regard.distributed.cost import Machine, ModelShape, Split, cost
from regard.distributed.speed import benchmark_communication, measure_compute
from regard.models import LanguageConfig, LanguageModel
from regard.nn import Packed, Rotary

CONFIG = LanguageConfig(
    vocabulary=4000, d_model=256, layers=6, heads=8, d_hidden=704, rotary=Rotary(), norm="rms", activation="silu",
    gated=True, bias=False,
)  # fmt: skip
SEQUENCE, BATCH, STEPS = 1024, 4, 2
SPLITS = (
    Split(), Split(data=2), Split(data=2, fsdp=True), Split(sequence=2, method="ring"),
    Split(sequence=2, method="heads"), Split(data=4), Split(data=4, fsdp=True), Split(sequence=4, method="ring"),
    Split(data=2, sequence=2, method="heads", fsdp=True),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--wall", action="store_true", help="also the seconds that pass")
    parser.add_argument("--out", type=Path, help="also as JSON")
    parser.add_argument("--split", help=argparse.SUPPRESS)  # passed to one of the processes
    options = parser.parse_args()
    if options.split:
        train(Split(**json.loads(options.split)))
        return
    model = described()
    measured = []
    print(f"{model.count:,} weights, {BATCH} x {SEQUENCE} tokens a step; float32, {options.cores} cores\n")
    names = ["memory", "sent", "computing", *(["step"] if options.wall else [])]
    print("| layout | " + " | ".join(f"{name} | predicted | error" for name in names) + " |")
    print("| --- " * (1 + 3 * len(names)) + "|")
    for split in SPLITS:
        real = run(split)
        alone = Machine(**{name: real.pop(name) for name in ("flops", "attention", "touched", "bandwidth", "latency")})
        costs = [
            cost(model, split, machine, sequence=SEQUENCE, batch=BATCH)
            for machine in (alone, replace(alone, cores=options.cores, ranks=split.ranks))
        ]
        predicted = {"memory": costs[0].peak, "sent": sum(costs[0].sent.values()), "computing": costs[0].time}
        predicted["step"] = costs[1].time
        measured.append({"layout": str(split), "measured": real, "predicted": predicted, "machine": asdict(alone)})
        print(f"| {split} | {' | '.join(row(name, real[name], predicted[name]) for name in names)} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(measured, indent=1))


def row(name: str, real: float, predicted: float) -> str:
    error = f"{predicted / real - 1:+.1%}" if real else ""
    shown = (
        f"{format_quantity(each)}B" if name in ("memory", "sent") else f"{each:.2f} s" for each in (real, predicted)
    )
    return " | ".join((*shown, error))


def described() -> ModelShape:
    with torch.device("meta"):
        return ModelShape.of(LanguageModel(CONFIG))


def run(split: Split) -> dict[str, float]:
    """Train with this number of processes, and return the measurements of the busiest."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(split.ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", "29611"]
    command += ["-m", "benchmarks.plan", "--split", json.dumps(asdict(split))]
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0:
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    around = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=around)
    if done.returncode:
        raise SystemExit(f"{split}: {done.stderr[-2000:]}")
    measured = [json.loads(each) for each in re.findall(r"\{[^{}]*\}", done.stdout)]  # of ranks that write at once
    return {
        name: (max if name in ("memory", "sent") else statistics.mean)([each[name] for each in measured])
        for name in measured[0]
    }


def train(split: Split) -> None:
    """One of the processes: the steps of `regard train`, without its data, logs and checkpoints."""
    from regard.training import state
    from regard.training.loop import build_optimizer
    from regard.training.recipe import Recipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    warm = LanguageModel(LanguageConfig(vocabulary=100, d_model=64, layers=1, heads=8, d_hidden=64, rotary=Rotary()))
    ids = torch.randint(100, (128,))
    warm.loss(Packed(ids, (128,)), ids).backward()
    del warm
    exact_memory(True)
    before = resident("VmRSS")
    torch.manual_seed(0)
    objective: Any = torch.nn.Module()
    objective.model = LanguageModel(CONFIG)
    model = objective.model
    objective.forward = lambda *given: model.loss(*given)
    together: Callable[[], Any] = nullcontext
    if split.sequence > 1:
        together = state.sequence_contexts(split.sequence, torch.device("cpu"), method=split.method)
    if split.fsdp:
        state.shard(objective)
    elif world > 1:
        objective = torch.nn.parallel.DistributedDataParallel(objective)
    optimizer = build_optimizer(model, Recipe())
    average = state.WeightAverage(objective, 0.99)
    turns, times, worked, moved = BATCH // split.data, [], [], []
    speeds: list[Machine] = []
    for step in range(1, STEPS + 4):
        if step == 4:
            peak = resident("VmHWM") - before
            exact_memory(False)  # page by page, all would take longer
        if step > 3:
            speeds.append(
                measure_compute(described(), Machine(**(benchmark_communication() if world > 1 else {})), SEQUENCE)
            )
        dist.barrier()
        start, before_it, cpu, counting = time.perf_counter(), loopback(), time.process_time(), ExitStack()
        own = counting.enter_context(traffic())  # of the shared sequence: ranks send more or less of it
        for turn in range(turns):
            torch.manual_seed(1000 * step + turn * split.data + rank // split.sequence)
            ids = torch.randint(CONFIG.vocabulary, (SEQUENCE + 1,))
            held_back = world > 1 and not split.fsdp and turn < turns - 1
            with objective.no_sync() if held_back else nullcontext(), together():
                loss = objective(Packed(ids[:-1], (SEQUENCE,)), ids[1:]) / SEQUENCE
                loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        worked.append(time.process_time() - cpu)
        dist.barrier()
        times.append(time.perf_counter() - start)
        went = loopback() - before_it
        counting.close()
        all_own = torch.tensor(own.sent.total())
        dist.all_reduce(all_own)
        moved.append((went - int(all_own)) / world + own.sent.total())
    measured = {"memory": peak, "sent": statistics.median(moved), "step": min(times[3:])}
    measured["computing"] = statistics.median(worked[3:])
    for name in ("flops", "attention", "touched", "bandwidth", "latency"):
        measured[name] = statistics.median(getattr(speed, name) for speed in speeds)
    print(json.dumps(measured), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def exact_memory(exact: bool) -> None:
    """Whether the C library gives every large block back at once, so that what is held is what is needed."""
    library = ctypes.CDLL(None)
    library.mallopt(-3, 1 << (18 if exact else 25))  # M_MMAP_THRESHOLD
    library.mallopt(-1, 1 << (18 if exact else 30))  # M_TRIM_THRESHOLD


def resident(name: str) -> int:
    """Bytes that this process has in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loopback() -> int:
    """Bytes sent over the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    main()
