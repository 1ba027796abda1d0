"""Measurements over many sizes: growth with N, mask tables, and a grid of calls compared with torch's kernel."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import regard as rg
from benchmarks.case import qkv
from benchmarks.timing import clock, time_interleaved
from regard.geometry import Frame
from regard.masks import tiles as tile_tables
from regard.masks.tiles import tiles

Report = dict[str, Any]


def patterns(N: int) -> dict[str, rg.Mask | None]:
    """One mask of every kind, sized by length where that is how it is defined."""
    steps = torch.arange(N)
    layout = (torch.arange(N // 64)[:, None] - torch.arange(N // 64)).abs() <= 1
    pairs = torch.stack([steps.repeat(3), torch.cat([steps, (steps + 1) % N, (steps * 7) % N])])
    return {
        "no mask": None,
        "causal()": rg.causal(),
        "window(255, 0)": rg.window(255, 0),
        "dilated(32, 4)": rg.dilated(32, 4),
        "prefix(64)": rg.prefix(64),
        "padding(3/4 N)": rg.padding([3 * N // 4]),
        "documents of 256": rg.documents(steps // 256),
        "global_tokens(4)": rg.global_tokens(range(4)),
        "blocks, 3 a row": rg.blocks(layout, 64),
        "random_blocks(3, 64)": rg.random_blocks(3, 64, seed=0),
        "edges, 3 a row": rg.edges(pairs),
        "longformer": rg.longformer(128, range(4)),
        "bigbird": rg.bigbird(64, seed=1),  # another than in the cases, whose tiles are remembered
        "dense(tensor)": rg.dense(torch.ones(N, N, dtype=torch.bool).tril()),
        "where(function)": rg.where(_every_other),
    }


def _every_other(b: Any, h: Any, p: Any, j: Any) -> Any:
    return (p - j) % 2 == 0


def growth(threads: int, quick: bool) -> Iterator[Report]:
    """Seconds over N for every pattern, the exponent of the last two doublings, and that of the tiles visited."""
    lengths = (512, 1024, 2048) if quick else (1024, 2048, 4096, 8192)
    for name in patterns(lengths[0]):
        seconds, work, first = [], [], 0.0
        for N in lengths:
            attend = rg.Attention(mask=patterns(N)[name])
            q, k, v = qkv(1, 2, N, 64).values()
            first = clock(lambda: attend(q, k, v))  # noqa: B023
            seconds.append(time_interleaved({"": lambda: attend(q, k, v)}, 0.03 if quick else 0.5)[""])  # noqa: B023
            explanation = attend.explain(q, k, v)
            work.append(explanation.flops)
        yield {
            "pattern": name, "threads": threads, "lengths": lengths, "seconds": seconds, "first": first - seconds[-1],
            "exponent": _exponent(lengths, seconds), "work": _exponent(lengths, work), "engine": explanation.engine,
        }  # fmt: skip


def _exponent(lengths: tuple[int, ...], values: list[float]) -> float:
    """Slope of log value over log N, from the last three points."""
    return math.log(values[-1] / values[-3]) / math.log(lengths[-1] / lengths[-3])


def mask_tables(quick: bool) -> Iterator[Report]:
    """Tiles of causal() & window(255, 0): against torch's block mask at 16,384 keys, and at a million keys alone."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask, N = rg.causal() & rg.window(255, 0), 16384

    def ours(length: int = N) -> tile_tables.Tiles:
        rg.clear_cache()
        return tiles(mask, Frame(1, 1, length, length, 0), (128, 128))

    def theirs() -> Any:
        return create_block_mask(
            lambda b, h, i, j: (j <= i) & (i - j <= 255), None, None, N, N, device="cpu", BLOCK_SIZE=128
        )

    layouts: list[Any] = []
    table, seconds = ours(), clock(lambda: layouts.append(theirs()))
    blocks = layouts.pop()
    visited = int(blocks.kv_num_blocks.sum() + blocks.full_kv_num_blocks.sum())
    if table.visited != visited:
        raise AssertionError(f"our table visits {table.visited} tiles, torch's block mask {visited}")
    del blocks
    seconds = seconds if quick else min(seconds, clock(theirs))  # seconds against microseconds: no need of many rounds
    ratio = seconds / time_interleaved({"": ours}, 0.3)[""]
    yield {"name": "16,384 keys, torch's create_block_mask / ours", "value": f"{ratio:,.0f}x", "target": ">= 100x",
           "met": ratio >= 100}  # fmt: skip
    million = min(clock(lambda: ours(1 << 20)) for _ in range(3))
    yield {"name": "1,048,576 keys, time", "value": f"{million:.2f} s", "target": "< 1 s", "met": million < 1}


def million_keys() -> Callable[[], Any]:
    """The call whose memory is measured."""
    mask = rg.causal() & rg.window(255, 0)

    def build() -> Any:
        rg.clear_cache()
        return tiles(mask, Frame(1, 1, 1 << 20, 1 << 20, 0), (64, 64))

    return build


def frozen_model() -> Callable[[], Any]:
    """The call that loads a frozen model of GPT-2's size, whose resident memory is measured."""
    folder = tempfile.TemporaryDirectory()
    rg.save(rg.models.LanguageModel(rg.models.LanguageConfig(50257, 768, 12, 12, 3072)), folder.name)

    def build() -> Any:
        with folder:
            model = rg.load(folder.name, frozen=True)
        model.generate(torch.zeros(1, 8, dtype=torch.long), max_new_tokens=2)
        return model

    return build


SHAPES = (  # B, H, G, Q, K, D
    (1, 1, 1, 16, 16, 16), (1, 8, 8, 64, 64, 64), (1, 8, 8, 256, 256, 64), (1, 8, 8, 1024, 1024, 64),
    (32, 12, 12, 64, 64, 32), (8, 12, 12, 128, 128, 64), (2, 8, 8, 512, 512, 128), (1, 1, 1, 2048, 2048, 64),
    (2, 4, 4, 333, 333, 40), (1, 16, 4, 512, 512, 64), (4, 8, 8, 1, 2048, 64), (1, 8, 8, 64, 2048, 64),
    (2, 4, 4, 1024, 1024, 16), (1, 2, 2, 512, 512, 256),
)  # fmt: skip
QUICK_SHAPES = SHAPES[:3] + SHAPES[4:6] + SHAPES[8:11]


def grid(threads: int, quick: bool) -> Iterator[Report]:
    """Time of the selected engine and of `sdpa`, for shapes and masks, forward and backward."""
    for B, H, G, Q, K, D in QUICK_SHAPES if quick else SHAPES:
        lengths = [max(1, K * (n + 1) // (B + 1)) for n in range(B)]
        masks = {"plain": None, "causal": rg.causal(), "padding": rg.padding(lengths)}
        for name, mask in masks.items():
            for backward in (False, True):
                yield _against_sdpa(rg.Attention(mask=mask), name, (B, H, G, Q, K, D), backward, threads, quick)


def _against_sdpa(
    attend: rg.Attention, name: str, shape: tuple[int, ...], backward: bool, threads: int, quick: bool
) -> Report:
    B, H, G, Q, K, D = shape
    q, k, v = (torch.randn(B, heads, n, D, requires_grad=backward) for heads, n in ((H, Q), (G, K), (G, K)))
    seed = torch.randn(B, H, Q, D)

    def call(engine: str | None) -> Callable[[], Any]:
        def forward() -> Any:
            return attend(q, k, v, engine=engine)

        return (lambda: torch.autograd.grad(forward(), (q, k, v), seed)) if backward else forward

    with torch.set_grad_enabled(backward):
        agree = torch.allclose(call(None)()[0], call("sdpa")()[0], atol=1e-4)
        seconds = time_interleaved({"ours": call(None), "sdpa": call("sdpa")}, 0.1 if quick else 0.6)
    return {
        "case": f"{shape} {name}{', with backward' if backward else ''}", "threads": threads, "agree": agree,
        "slower": seconds["ours"] / seconds["sdpa"], "seconds": seconds["ours"],
        "engine": attend.explain(q, k, v).engine,
    }  # fmt: skip


def run_parts(what: Iterator[Report], report: Callable[[str], None]) -> list[Report]:
    start, reports = time.perf_counter(), list(what)
    report(f"{len(reports)} measured in {time.perf_counter() - start:.0f} s")
    return reports
