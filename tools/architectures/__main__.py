"""`python -m tools.architectures`: compare every architecture and write docs/architectures.md."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import transformers

from tools.architectures.build import architectures
from tools.architectures.compare import compare
from tools.architectures.table import write

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="some architectures only; these are compared again")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "architectures.jsonl", help="kept rows")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one architecture")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="address space of one architecture")
    parser.add_argument("--again", action="append", default=[], help="compare architectures of this status again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows = _read(options.results)
    for name in options.names or architectures():
        if name in rows and not options.names and rows[name]["status"] not in options.again:
            continue
        rows[name] = _run(name, options.seconds, options.gigabytes)
        print(f"{name}: {rows[name]['status']} {'; '.join(rows[name]['notes'])}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
    known = set(architectures())
    write(ROOT / "docs" / "architectures.md", [row for name, row in sorted(rows.items()) if name in known])
    return int(any(row["status"] in ("wrong", "failed") for row in rows.values()))


def _read(path: Path) -> dict[str, dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["architecture"]: row for row in map(json.loads, lines)}  # the last row of a name counts


def _run(name: str, seconds: float, gigabytes: float) -> dict:
    """Compare in a separate process, so that one that hangs or runs out of memory does not stop the others."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        limit = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            row = compare(name, lambda: os.write(send, b"\n"))
        except BaseException as error:
            row = {"architecture": name, "status": "failed", "notes": [f"{type(error).__name__}: {error}"[:160]]}
        with os.fdopen(send, "w") as pipe:
            json.dump(row, pipe)
        os._exit(0)
    os.close(send)
    deadline, note = time.monotonic() + seconds, "the process died"
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            note = f"took more than {seconds} s"
            break
        time.sleep(0.02)
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    if text.strip():
        return json.loads(text)
    return {"architecture": name, "status": "failed" if text else "not built", "notes": [note]}


if __name__ == "__main__":
    sys.exit(main())
