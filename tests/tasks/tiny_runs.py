"""Tiny data and models, and trainings that are killed."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.tasks import Run, Sources, Task, create_run, tasks, train
from regard.training.loop import NoCallback, Step


def sentences(count: int, seed: int = 1) -> list[str]:
    """Sentences such as "the red cat sees one dog", in which the subject determines the verb."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        subject, verb = chance.choice([("cat", "sees"), ("dog", "hears"), ("bird", "likes")])
        first, other = chance.choice(["the", "a", "one"]), chance.choice(["cat", "dog", "bird"])
        how = chance.choice([[], ["red"], ["blue"], ["small"], ["big", "red"]])
        rows.append(" ".join([first, *how, subject, verb, *chance.choice([[], ["the", other]])]))
    return rows


def texts(folder: Path, count: int = 60) -> str:
    path = folder / "texts.txt"
    path.write_text("".join(f"{line}\n" for line in sentences(count)))
    return str(path)


def pairs(folder: Path, count: int = 160) -> str:
    """Write pairs in which the translation has every word reversed."""
    path = folder / "pairs.tsv"
    lines = [f"{line}\t{' '.join(word[::-1] for word in line.split())}\n" for line in sentences(count)]
    path.write_text("".join(lines))
    return str(path)


def classes(folder: Path, count: int = 120) -> str:
    """Write sentences labelled by whether they contain "cat sees"."""
    path = folder / "classes.csv"
    lines = [f"{line},{'cat' if 'cat sees' in line else 'none'}\n" for line in sentences(count)]
    path.write_text("text,label\n" + "".join(lines))
    return str(path)


DATA = {
    "classify": classes,
    "embed": pairs,
    "language": lambda folder: texts(folder, 200),
    "masked": texts,
    "translate": pairs,
}


def small(name: str, **options: Any) -> Task:
    return tasks()[name](**({"d_model": 16, "layers": 1, "heads": 2, "vocabulary": 300} | options))


def new_run(folder: Path, name: str = "masked", *, options: dict[str, Any] | None = None, **recipe: Any) -> Run:
    """Create a run, without training it, in `folder / "run"`."""
    task = small(name, **(options or {}))
    known = {"steps": 8, "tokens": 120, "warmup": 2, "evaluate_every": 4, "save_every": 3, "ema": 0.9} | recipe
    run, _ = create_run(
        folder / "run", task, replace(task.recipe, **known), Sources((DATA[name](folder),), held_out=12)
    )
    return run


class RecordingCallback(NoCallback):
    """Records all events."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.losses: list[float] = []
        self.lines: list[str] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def on_evaluate(self, step: int, loss: float, best: bool) -> None:
        self.losses.append(loss)

    def on_message(self, line: str) -> None:
        self.lines.append(line)


class Signals(NoCallback):
    """Sends a signal to this process at a step."""

    def __init__(self, step: int, number: int) -> None:
        self.at, self.number = step, number

    def step(self, step: Step) -> None:
        if step.step == self.at:
            os.kill(os.getpid(), self.number)


def kill_at_step(folder: str, step: int) -> None:
    torch.set_num_threads(1)
    train(Run.open(folder), callback=Signals(step, signal.SIGKILL))


def kill_while_saving(folder: str, moment: str) -> None:
    """Kill the training within the second checkpoint: while it is written, before it is renamed, or right after."""
    from regard.training import runs

    torch.set_num_threads(1)
    saves, die = [0], lambda: os.kill(os.getpid(), signal.SIGKILL)
    write_atomically, rename = runs.write_atomically, os.replace

    def write_and_die(path: Path, write: Any) -> Path:
        saves[0] += path.parent.name == "checkpoints"

        def write_half(partial: Path) -> None:
            partial.write_bytes(b"half")
            die()

        return write_atomically(path, write_half if saves[0] == 2 and moment == "while it is written" else write)

    def rename_and_die(old: Any, new: Any) -> None:
        last = saves[0] == 2 and Path(new).parent.name == "checkpoints"
        if last and moment == "before it has its name":
            die()
        rename(old, new)
        if last:
            die()

    runs.write_atomically, os.replace = write_and_die, rename_and_die  # type: ignore[assignment]
    train(Run.open(folder))


def train_as_rank(world: int, folder: str, rank: int, port: int, recipe: dict[str, Any], stop: int = 0) -> None:
    """Train as one of several processes, which are all interrupted at step `stop`."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    run = Run.open(folder)
    run.recipe = replace(run.recipe, **recipe)
    train(run, callback=Signals(stop, signal.SIGINT))
    assert torch.distributed.get_world_size() == world
    torch.distributed.destroy_process_group()


def shard_on_two_ranks(rank: int, port: int) -> None:
    """As one of two FSDP processes, restore a captured state, continue, and compare with an uninterrupted training."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from regard.training import state

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def build() -> Any:
        torch.manual_seed(0)
        objective = nn.Sequential()
        objective.model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        fully_shard(objective, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2, fused=True)
        return objective, optimizer, state.WeightAverage(objective, 0.9)

    def steps(objective: Any, optimizer: Any, average: Any, numbers: range) -> dict[str, torch.Tensor]:
        for n in numbers:
            torch.manual_seed(2 * n + rank)
            objective(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(n)
        return {name: value.clone() for name, value in state.capture(objective, optimizer, average).items()}

    one, other = build(), build()
    kept = [steps(*one, range(1, 4))]
    dist.broadcast_object_list(kept, 0)  # both read the same file
    ended = steps(*one, range(4, 7))
    state.restore(kept[0], *other)
    again = steps(*other, range(4, 7))
    assert bool(ended) == (rank == 0)
    assert [name for name in ended if not torch.equal(ended[name], again[name])] == []
