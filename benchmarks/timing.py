"""Times of competitors that take turns in one process: the best of many short rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SLICE = 0.01  # seconds that quick calls fill before the next competitor's turn
LEAST = 3  # rounds
SEVERAL = 8  # of calls that take less than a second: of three, none may have a quiet moment on a shared machine
PAUSE = 0.003  # seconds before a turn: the threads of the one before may still spin, waiting for work

_now = time.perf_counter


def use_cpu_time() -> None:
    """Measure processor time instead of wall-clock time, for one thread on a busy machine."""
    global _now
    _now = time.process_time


def clock(call: Callable[[], Any], times: int = 1) -> float:
    start = _now()
    for _ in range(times):
        call()
    return max(_now() - start, 1e-9) / times


def time_interleaved(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """Return the least seconds of one call of each.

    A competitor leaves once it has had its rounds and twice its share of the budget, so that slow ones do not hold
    up the rest. A quick call is made once before it is timed, since another's threads and data were there before.
    """
    best = {name: clock(call) for name, call in calls.items()}
    spent, rounds = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0)
    waiting, start = list(calls), time.perf_counter()
    while waiting:
        for name in list(waiting):
            call = calls[name]
            time.sleep(PAUSE)
            if best[name] < 5 * SLICE:
                call()
            times = max(1, min(1000, int(SLICE / best[name])))
            elapsed = clock(call, times)
            best[name] = min(best[name], elapsed)
            spent[name] += elapsed * times
            rounds[name] += 1
        over = time.perf_counter() - start > budget
        waiting = [
            name
            for name in waiting
            if rounds[name] < (SEVERAL if best[name] < 1 <= budget else LEAST)
            or (not over and spent[name] < 2 * budget / len(calls) and rounds[name] < 200)
        ]
    return best
