"""What `regard plan` predicts beside what is measured: memory, bytes moved and step time of real trainings.

    python -m benchmarks.plan --cores 2

Each layout is run by processes of its own, on one thread each. Speeds are measured first, by the same processes at the
same time: so many as there will be, or a plan for a quiet machine is held against a busy one. Bytes are those that went
over the loopback device (in a network namespace of their own, where the system lets us make one), memory is the peak of
a process over what it held before there was a model, and the time is the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regard.distributed.command import units
from regard.distributed.cost import Machine, Model, Split, cost
from regard.distributed.speed import measured, on_the_wire
from regard.models import LanguageConfig, LanguageModel
from regard.nn import Packed, Rotary

CONFIG = LanguageConfig(
    vocabulary=4000, width=256, layers=6, heads=8, hidden=704, rotary=Rotary(), norm="rms", activation="silu",
    gated=True, bias=False,
)  # fmt: skip
SEQUENCE, BATCH, STEPS = 1024, 4, 4
SPLITS = (
    Split(), Split(data=2), Split(data=2, fsdp=True), Split(sequence=2, how="ring"), Split(sequence=2, how="heads"),
    Split(data=4), Split(data=4, fsdp=True), Split(sequence=4, how="ring"), Split(sequence=4, how="heads"),
    Split(data=2, sequence=2, how="ring"), Split(data=2, sequence=2, how="heads", fsdp=True),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="also as JSON")
    parser.add_argument("--split", help=argparse.SUPPRESS)  # what one of the processes is told
    options = parser.parse_args()
    if options.split:
        train(Split(**json.loads(options.split)))
        return
    model = described()
    found = []
    print(
        f"{model.count:,} weights, {BATCH} x {SEQUENCE} tokens a step, {options.cores} cores; float32, a thread a rank\n"
    )
    print("| layout | memory | predicted | error | sent by a rank | predicted | error | step | predicted | error |")
    print("| --- " * 10 + "|")
    for split in SPLITS:
        machine = Machine(cores=options.cores, ranks=split.ranks)
        machine = on_the_wire(measured(model, machine, SEQUENCE))
        real = run(split)
        said = cost(model, split, machine, sequence=SEQUENCE, batch=BATCH)
        pairs = ((real["memory"], said.peak), (real["sent"], sum(said.sent.values())), (real["seconds"], said.time))
        found.append({"layout": str(split), "measured": real, "predicted": asdict(said), "machine": asdict(machine)})
        cells = [row(*pair, "s" if n == 2 else "B") for n, pair in enumerate(pairs)]
        print(f"| {split} | {' | '.join(cells)} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


def row(real: float, said: float, unit: str) -> str:
    error = f"{said / real - 1:+.1%}" if real else ""
    shown = (f"{real:.3f} s", f"{said:.3f} s") if unit == "s" else (f"{units(real)}B", f"{units(said)}B")
    return " | ".join((*shown, error))


def described() -> Model:
    with torch.device("meta"):
        return Model.of(LanguageModel(CONFIG))


def run(split: Split) -> dict[str, float]:
    """Train by so many processes, and what the busiest measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(split.ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", "29611"]
    command += ["-m", "benchmarks.plan", "--split", json.dumps(asdict(split))]
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0:
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    around = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=around)
    if done.returncode:
        raise SystemExit(f"{split}: {done.stderr[-2000:]}")
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: max(each[name] for each in told) for name in told[0]}


def train(split: Split) -> None:
    """One of the processes: the steps of `regard train`, without its data, logs and checkpoints."""
    from regard.tasks import state
    from regard.tasks.loop import _optimizer
    from regard.tasks.task import Recipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    warm = LanguageModel(LanguageConfig(vocabulary=100, width=64, layers=1, heads=8, hidden=64, rotary=Rotary()))
    ids = torch.randint(100, (128,))
    warm.loss(Packed(ids, (128,)), ids).backward()
    del warm
    before = resident("VmRSS")
    torch.manual_seed(0)
    objective: Any = torch.nn.Module()
    objective.model = LanguageModel(CONFIG)
    model = objective.model
    objective.forward = lambda *given: model.loss(*given)
    together = (
        state.sharing(split.sequence, torch.device("cpu"), how=split.how) if split.sequence > 1 else nullcontext
    )  # fmt: skip
    if split.fsdp:
        state.shard(objective)
    elif world > 1:
        objective = torch.nn.parallel.DistributedDataParallel(objective)
    optimizer = _optimizer(model, Recipe())
    average = state.Average(objective, 0.99)
    turns, times, moved, worked = BATCH // split.data, [], [], []
    for step in range(1, STEPS + 2):
        dist.barrier()
        start, sent, cpu = time.perf_counter(), loopback(), time.process_time()
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
        moved.append(loopback() - sent)
    peak = resident("VmHWM") - before
    told = {"memory": peak, "sent": statistics.median(moved[1:]) / world, "seconds": min(times[1:])}
    told["computing"] = statistics.median(worked[1:])
    print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def resident(name: str) -> int:
    """Bytes that this process has in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loopback() -> int:
    """Bytes that went over the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    main()
