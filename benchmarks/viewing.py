"""Costs of the viewer: size of pages, first paint and hover in Chromium, and windows of a long sequence.

python -m benchmarks.viewing
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from tests.view.browser import Tab, launch_browser

import regard as rg
import regard.view

HOVER = """async () => {
  const rows = [...document.querySelectorAll(".column-query .row")].slice(2, 22), taken = [];
  for (const row of rows) {
    const box = row.getBoundingClientRect(), began = performance.now();
    for (const kind of ["pointerover", "pointerenter", "pointermove"])
      row.dispatchEvent(new PointerEvent(kind, { bubbles: true, clientX: box.x + 20, clientY: box.y + 8 }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    taken.push(performance.now() - began);
  }
  return taken;
}"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


@torch.no_grad()
def capture_record(tokens: int, layers: int, heads: int) -> rg.view.Record:
    torch.manual_seed(0)
    config = rg.models.LanguageConfig(
        1000, d_model=64 * heads, layers=layers, heads=heads, d_hidden=256, positions=tokens
    )
    model = rg.models.LanguageModel(config).eval()
    rg.nn.freeze(model)
    with rg.view.capture(model) as record:
        model(torch.randint(5, 1000, (1, tokens)))
    return record


def page(folder: Path) -> None:
    """12 layers of 12 heads over 512 tokens."""
    path = capture_record(512, 12, 12).save(folder / "page.html")
    print(f"512 tokens, 12 x 12 heads: page {path.stat().st_size / 1e6:.2f} MB")
    with launch_browser() as browser:
        paints = []
        for _ in range(3):
            tab = Tab(browser).open(path.as_uri())
            tab.wait_frames()
            paints.append(tab.page.evaluate(PAINT))
        tab.open(path.as_uri(), "view=tokens")
        tab.page.wait_for_selector(".column-query .row")
        times = tab.page.evaluate(HOVER)
    print(f"first contentful paint {', '.join(f'{ms:.0f}' for ms in paints)} ms")
    print(f"hover over 20 tokens: median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms")


def windows(tokens: int) -> None:
    """Time windows of a live page with one layer of 12 causal heads."""
    record = capture_record(tokens, 1, 12)
    began = time.perf_counter()
    record.precompute()
    print(f"{tokens:,} tokens, 12 heads: ready in {time.perf_counter() - began:.0f} s")
    middle = tokens // 2
    for tall, wide in ((64, 64), (512, 512), (512, tokens), (4000, 4000), (tokens, 512), (tokens, tokens)):
        rows, columns = ((n := min(middle, tokens - size), n + size) for size in (tall, wide))
        times = []
        for head in range(4):
            began = time.perf_counter()
            record.window(0, head, rows, columns)
            times.append(1e3 * (time.perf_counter() - began))
        print(f"window of {tall:,} x {wide:,}: worst of 4 {max(times):.0f} ms")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page(Path(folder))
    windows(32768)
