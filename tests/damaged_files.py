"""Damaged files: every field of a JSON file changed in every way, and a process with limits to read them in.

`python -m tests.damaged_files JOB FOLDER ... [--every N]` reads every N-th mutation with limits on memory and time, and
prints those that end in anything but success or one clear error. With `REGARD_EVERY_MUTATION=1`, tests read all.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MISSING = object()
DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
VALUES: dict[str, Any] = {
    "missing": MISSING, "null": None, "zero": 0, "minus one": -1, "seven": 7, "300000": 300_000, "1e7": 10**7,
    "1e12": 10**12, "1e30": 10**30, "one and a half": 1.5, "1e12 as float": 1e12, "NaN": float("nan"),
    "Infinity": float("inf"), "true": True, "false": False, "empty text": "", "text": "wrong", "long text": "x" * 10**6,
    "empty list": [], "list": [1, "a", None], "long list": [3] * 10**5, "empty object": {}, "object": {"a": {"b": 1}},
    "deep": DEEP,
}  # fmt: skip
MEMORY, SECONDS = 1_500_000_000, 20


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the paths that can be changed in JSON: the first entry of lists, first and last of vocabularies."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in list(value) if len(value) < 100 else [next(iter(value)), next(reversed(value))]:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def changed(whole: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return JSON with another value at one path."""
    damaged = copy.deepcopy(whole)
    around = damaged
    for key in at[:-1]:
        around = around[key]
    if value is MISSING:
        del around[at[-1]]
    else:
        around[at[-1]] = value
    return damaged


def mutations(path: Path, every: int) -> Iterator[tuple[str, str]]:
    """Iterate over descriptions and texts of a mutated JSON file; every n-th mutation, deterministically."""
    whole = json.loads(path.read_text())
    for at in places(whole):
        for name, value in VALUES.items():
            title = f"{path.name}: {'.'.join(map(str, at))} = {name}"
            if zlib.crc32(title.encode()) % every == 0:
                yield title, json.dumps(changed(whole, at, value))


def spoiled(path: Path) -> Iterator[tuple[str, bytes]]:
    """Iterate over damaged contents of a file: truncated, empty, zeros, noise."""
    held = path.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.99):
        yield f"{path.name}: the first {share:.0%}", held[: int(len(held) * share)]
    yield f"{path.name}: zeros", bytes(len(held))
    yield f"{path.name}: noise", bytes((n * 7919 + 13) % 251 for n in range(min(len(held), 5000)))
    yield f"{path.name}: more than there was", held + b"\0" * 64
    yield f"{path.name}: an object", b"{}"
    yield f"{path.name}: a list", b"[]"
    yield f"{path.name}: nested", b"[" * 100_000
    yield f"{path.name}: no UTF-8", b'{"a": "\xff\xfe"}'


def attempt(title: str, job: Callable[[], Any]) -> str | None:
    """Run a job and return what is wrong with its outcome: None if it succeeds or raises a one-line user error."""

    def out_of_time(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    started = time.perf_counter()
    try:
        job()
    except (ValueError, OSError) as error:
        text = str(error)
        if type(error) not in allowed():  # exact types: a subclass such as UnicodeDecodeError is not intended
            return f"{title}: {type(error).__name__}: {text[:200]}"
        if "\n" in text or len(text) > 3000:
            return f"{title}: {len(text)} characters, {text.count(chr(10)) + 1} lines: {text[:200]}"
    except BaseException as error:
        return f"{title}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    took = time.perf_counter() - started
    return f"{title}: took {took:.1f} s" if took > SECONDS / 2 else None


def allowed() -> tuple[type, ...]:
    from regard.data.saved_files import BadFile
    from regard.files import NotAFile, Unwritable
    from regard.tasks import UserError

    return (ValueError, FileNotFoundError, UserError, BadFile, NotAFile, Unwritable)


def sweep(folder: Path, files: list[str], job: Callable[[], Any], every: int) -> Iterator[str]:
    """Run the job on every mutation of these files of a folder, with the others unchanged."""
    for name in files:
        path = folder / name
        held = path.read_bytes()
        cases: list[tuple[str, bytes]] = list(spoiled(path))[:: max(1, every // 40)]
        if name.endswith(".json"):
            cases += [(title, text.encode()) for title, text in mutations(path, every)]
        for title, content in cases:
            path.write_bytes(content)
            if (wrong := attempt(f"{folder.name}/{title}", job)) is not None:
                yield wrong
        path.write_bytes(held)


def bounded() -> None:
    """Limit this process to little more memory than it has."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(job: str, folders: list[Path], every: int) -> list[str]:
    """Run a job in a separate process and return the failures."""
    every = 1 if os.environ.get("REGARD_EVERY_MUTATION") else every
    command = [sys.executable, "-m", "tests.damaged_files", job, *map(str, folders), "--every", str(every)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=3600, check=False)
    lines = done.stdout.splitlines()
    return lines + ([] if done.returncode == 0 else [f"ended with {done.returncode}: {done.stderr[-2000:]}"])


def load_checkpoint(folder: Path) -> None:
    import regard as rg

    rg.load(folder)


def use_run(folder: Path) -> None:
    """Do what `regard predict` and `regard evaluate` do, except for baselines."""
    from regard.errors import BadRows
    from regard.tasks import Run
    from regard.training.sources import reread_examples

    run = Run.open(folder)
    examples = reread_examples(run)
    model, _ = run.model(frozen=True)
    run.minutes()
    rows = run.task.evaluable_rows(run.processor, examples.test, BadRows(skip=True))[:2]
    if rows:
        run.task.evaluate(model, run.processor, rows)
        list(
            run.task.predict(
                model, run.processor, [row._replace(values=row.values[:1]) for row in rows], BadRows(skip=True)
            )
        )


def resume_run(folder: Path) -> None:
    from regard.tasks import Run, train

    train(Run.open(folder))


def embed_sentences(folder: Path) -> None:
    import regard as rg

    model: Any = rg.load(folder)
    model.embed(["the cat sat", "a dog"])


def spell_letters(folder: Path) -> None:
    import regard as rg

    rg.models.tokenizer(folder).decode([1, 2, 2, 0])


JOBS = {
    "checkpoint": load_checkpoint,
    "sentences": embed_sentences,
    "letters": spell_letters,
    "run": use_run,
    "resume": resume_run,
}


def main(job: str, *arguments: str) -> None:
    import torch

    import regard.models.checkpoints.loading
    import regard.tasks  # noqa: F401

    torch.set_num_threads(1)
    *folders, _, every = arguments
    for name in folders:  # import everything needed before memory is limited
        JOBS[job](Path(name))
    bounded()
    for name in folders:
        folder = Path(name)
        files = sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*")
            if path.suffix in (".json", ".jsonl", ".safetensors")
        )  # fmt: skip
        for wrong in sweep(folder, files, lambda folder=folder: JOBS[job](folder), int(every)):
            print(wrong, flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(*sys.argv[1:])
