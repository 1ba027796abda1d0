"""Groups of gloo processes on this machine, forked from a server that has imported torch, to start fast."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
MODULES = ("behaviour", "cases", "failing_ranks", "peak_memory", "sharded_models", "training_step")
PRELOADED = [
    *(f"tests.distributed.{name}" for name in MODULES),
    "torch._dynamo",
]  # checkpointing imports parts of dynamo
assert all(find_spec(name) for name in PRELOADED), "the server skips a module that it does not find"
CONTEXT.set_forkserver_preload(PRELOADED)


def run(
    function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 240, timeout: float = 60, grace: float = 60
) -> list[Any]:
    """Run `function(rank, *args)` in the processes of one group; return the result or the exception of each.

    A process that ends without a result gives None. Processes that run longer than `seconds`, or than `grace` after the
    first failure, are killed and give a TimeoutError. `timeout` is that of the group.
    """
    results: list[Any] = [TimeoutError("it took too long")] * ranks
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = {}, []
        for rank in range(ranks):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            given = function, rank, ranks, str(Path(folder) / "meeting"), timeout, theirs, args
            processes.append(CONTEXT.Process(target=_rank, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            ends[ours] = rank
        until = time.monotonic() + seconds
        while ends and (left := until - time.monotonic()) > 0:
            for end in wait(list(ends), left):
                assert isinstance(end, Connection)
                try:
                    result = end.recv()
                except EOFError:
                    result = None
                results[ends.pop(end)] = result
                if result is None or isinstance(result, BaseException):
                    until = min(until, time.monotonic() + grace)
        for process in processes:
            process.kill()
            process.join()
    return results


def all_well(results: list[Any]) -> list[Any]:
    """Return the results, or raise the first failure."""
    for rank, result in enumerate(results):
        if isinstance(result, BaseException) or result is None:
            raise AssertionError(f"rank {rank}: {result!r}") from result
    return results


def _rank(
    function: Callable[..., Any], rank: int, ranks: int, meeting: str, timeout: float, end: Connection, args: tuple
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        result = function(rank, *args)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        result = error
    end.send(result)
    end.close()
    os._exit(0)  # closing a group aborts if another rank is gone
