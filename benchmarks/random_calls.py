"""Random calls of any size against torch's kernel: the geometric mean, and those that are slower."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from benchmarks.case import normal
from benchmarks.timing import time_interleaved

COUNT, QUICK_COUNT, SEED = 500, 25, 1
LEAST = 0.95  # of SDPA's speed
MEANS = {1: 1.59, 2: 1.93}  # least geometric mean by threads
MAX_WORK = 3e8  # multiply-adds of one product
CONFIRMATIONS = 2  # longer measurements of a call that looks slow, to tell it from noise


@dataclass(frozen=True)
class RandomCall:
    B: int
    H: int
    G: int
    Q: int
    K: int
    D: int
    dtype: str
    backward: bool
    transposed: bool  # (B, N, H, D) in memory, as projections give it

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}{getattr(self, axis)}" for axis in "BHGQKD")
        kind = "forward + backward" if self.backward else "forward"
        return f"{sizes} {self.dtype}{' transposed' if self.transposed else ''}, {kind}"

    def tensor(self, heads: int, count: int, seed: int) -> Tensor:
        shape = (self.B, count, heads, self.D) if self.transposed else (self.B, heads, count, self.D)
        x = normal(*shape, seed=seed, dtype=getattr(torch, self.dtype))
        return (x.transpose(1, 2) if self.transposed else x).requires_grad_(self.backward)


def draw(chance: random.Random) -> RandomCall:
    """Draw a call; sizes are uniform in their logarithm, so that half of the calls are small."""
    while True:
        group, kv_heads = chance.choice((1, 1, 1, 2, 4)), chance.choice((1, 2, 4, 8, 12))
        Q = round(2 ** chance.uniform(0, 11))
        K = Q if chance.random() < 0.5 else round(2 ** chance.uniform(0, 11))
        B, D = round(2 ** chance.uniform(0, 5)), chance.choice((16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 192, 256))
        if B * group * kv_heads * Q * K * D <= MAX_WORK:
            dtype = chance.choice(("float32", "float32", "bfloat16", "float16"))
            sizes = B, group * kv_heads, kv_heads, Q, K, D
            return RandomCall(*sizes, dtype, chance.random() < 0.5, chance.random() < 0.5)


def calls(count: int = COUNT) -> list[RandomCall]:
    chance = random.Random(SEED)
    return [draw(chance) for _ in range(count)]


def build(call: RandomCall) -> dict[str, Callable[[], Any]]:
    """Return our call and torch's, after comparing our result with torch's in float64."""
    q, k, v = call.tensor(call.H, call.Q, 1), call.tensor(call.G, call.K, 2), call.tensor(call.G, call.K, 3)
    grouped = call.H != call.G
    own = lambda: rg.attention(q, k, v)  # noqa: E731
    torch_own = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)  # noqa: E731
    if call.backward:
        grad = torch.randn_like(q)
        own, torch_own = (
            lambda forward=forward: torch.autograd.grad(forward(), (q, k, v), grad) for forward in (own, torch_own)
        )
    wide = [x.detach().double().requires_grad_(call.backward) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, enable_gqa=grouped)
    expected = torch.autograd.grad(exact, wide, grad.double()) if call.backward else [exact]
    bound = 2e-4 if call.dtype == "float32" else 5e-2
    for mine, other in zip(own() if call.backward else [own()], expected, strict=True):
        # of one key, the gradients of query and key are rounding errors: also an absolute bound
        error = (mine.double() - other).norm() / (other.norm() + other.numel() ** 0.5)
        if not error < bound:
            raise ValueError(f"{call}: our result differs from that in float64 by {error:.1e}")
    return {"ours": own, "SDPA": torch_own}


def random_calls(threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The ratio of each call, torch's time / ours; 0 and the reason where our result is too far from the exact one."""
    for call in calls(QUICK_COUNT if quick else COUNT):
        try:
            pair = build(call)
        except ValueError as error:
            yield asdict(call) | {"call": str(error), "threads": threads, "seconds": 0.0, "ratio": 0.0}
            continue
        seconds = time_interleaved(pair, 0.08)
        for _ in range(CONFIRMATIONS):
            if seconds["SDPA"] < LEAST * seconds["ours"]:
                again = time_interleaved(pair, 0.5)
                seconds = {name: min(seconds[name], again[name]) for name in pair}
        yield asdict(call) | {
            "call": str(call), "threads": threads, "seconds": seconds["ours"],
            "ratio": seconds["SDPA"] / seconds["ours"],
        }  # fmt: skip


def geometric_mean(ratios: list[float]) -> float:
    """Return the mean of the calls that were timed."""
    timed = [ratio for ratio in ratios if ratio]
    return math.exp(sum(map(math.log, timed)) / len(timed))


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Where, what was measured, and whether the target is met."""
    if not rows:
        return []
    threads, mean = rows[0]["threads"], geometric_mean([row["ratio"] for row in rows])
    where = f"{len(rows)} random calls ({threads} threads)"
    slow, least = sum(row["ratio"] < LEAST for row in rows), MEANS.get(threads, 1.0)
    return [
        (where, f"{slow} below {LEAST:g}x SDPA, none allowed", not slow),
        (where, f"geometric mean {mean:.2f}x SDPA, at least {least:g}x", mean >= least),
    ]


def section(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The part of the report: the means, and every call that is too slow."""
    if not rows:
        return
    yield "\n## Random calls of any size\n"
    yield (
        "Sizes are uniform in their logarithm: Q and K from 1 to 2,048, D from 16 to 256, grouped heads, three dtypes, "
        f"contiguous or transposed, forward or with backward. Listed are those below {LEAST:g}x SDPA.\n"
    )
    yield "| call | threads | ours | SDPA / ours |\n| --- | --- | --- | --- |"
    for threads in sorted({row["threads"] for row in rows}):
        some = [row for row in rows if row["threads"] == threads]
        mean = geometric_mean([row["ratio"] for row in some])
        yield f"| all {len(some)}, geometric mean | {threads} | | {mean:.2f}x |"
    for row in sorted(rows, key=lambda row: row["ratio"]):
        if row["ratio"] < LEAST:
            yield f"| {row['call']} | {row['threads']} | {row['seconds'] * 1e6:.1f} µs | {row['ratio']:.2f}x |"
