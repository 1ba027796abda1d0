"""Every number that a page or the server shows is the weight, or the mean of the weights, that its label names."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.view import Record, capture
from tests.view.browser import Tab, write
from tests.view.models import Attends

pytest.importorskip("uvicorn")
from regard.view.server import Session, application, configured

# In the page: the pointer goes to each of some places of the map, and what the tip says is read.
MAP = """(places) => { const canvas = document.querySelector("canvas.plane"), box = canvas.getBoundingClientRect();
  const read = ([x, y]) => {
    const at = { clientX: box.left + 116 + x * (box.width - 126), clientY: box.top + 84 + y * (box.height - 94) };
    canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, bubbles: true }));
    return document.querySelector(".tip").innerText;
  };
  return places.map(read) }"""
TOKENS = """async (count) => { const told = [];
  for (const side of ["query", "key"]) for (let n = 0; n < count; n++) {
    const row = document.querySelectorAll(`.column-${side} .row`)[n], box = row.getBoundingClientRect();
    row.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 9, clientY: box.y + 9, bubbles: true }));
    for (let tries = 0; tries < 100; tries++) {
      await new Promise((done) => requestAnimationFrame(done));
      const lines = [...document.querySelectorAll(".tip:not([hidden]) .tip-line")].map((line) => line.innerText);
      if (lines.length > 1 && lines[0].split(/\\s+/)[1] === String(n) && lines[0].toLowerCase().startsWith(side)) {
        told.push([side, n, lines.slice(1)]);
        break;
      }
    }
  }
  return told }"""
SIZES = [(30, 2, 3), (100, 12, 12), (513, 2, 4), (5003, 1, 2)]  # tokens, layers, heads
LOOKS: dict[str, tuple[rg.Attention, list[Tensor]]] = {}


class Layers(nn.Module):
    def __init__(self, attend: rg.Attention, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends(attend) for _ in range(layers))

    def forward(self, queries: list[Tensor]) -> None:
        for layer, query in zip(self.layers, queries, strict=True):
            layer(query)


def recorded(text: str) -> Record:
    """Causal attention of random queries over as many tokens as the text says; LOOKS keeps what it is compared with."""
    tokens, layers, heads = map(int, text.split())
    torch.manual_seed(tokens)
    attend = rg.Attention(mask=rg.causal())
    queries = [1.5 * torch.randn(1, heads, tokens, 8) for _ in range(layers)]
    LOOKS[text] = attend, queries
    model = Layers(attend, layers)
    with capture(model) as record:
        model(queries)
    return record


@contextmanager
def served(session: Session) -> Iterator[str]:
    import uvicorn

    server = uvicorn.Server(configured(application(session), 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def is_rounded(shown: str, number: float) -> bool:
    """Whether a text is a number to the digits that it has, up to float32's own rounding."""
    if shown.startswith("<"):
        return 0 < number < float(shown[1:])
    digits, _, power = shown.partition("e")
    step = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    if shown == "0":
        return number == 0
    return len(digits.replace(".", "").lstrip("0")) <= 4 and abs(float(shown) - number) <= step / 2 + 3e-6 * number


def cells(told: str, weights: Callable[[slice, slice], Tensor]) -> None:
    """What a tip of the map says, compared with the weights."""
    sides = [re.search(rf"{name} (\d+)(?:–(\d+))?\s", told) for name in ("Quer(?:y|ies)", "Keys?")]
    parts = [slice(int(found[1]), int(found[2] or found[1]) + 1) for found in sides]
    values = re.findall(r"(Weight|Pooled weight)\s+(<?[\d.]+(?:e-\d+)?)\s", told + "\n")
    assert len(values) == 1, told
    name, shown = values[0]
    single = all(part.stop - part.start == 1 for part in parts)
    assert name == ("Weight" if single else "Pooled weight"), told
    mean = weights(*parts).double().mean().item()
    assert is_rounded(shown, mean), f"{told}\nis {mean}"


@pytest.fixture(scope="module")
def opened(browser: Any) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.context.close()
    assert tab.trouble == []


def weights_of(text: str, layer: int, head: int) -> Callable[[slice, slice], Tensor]:
    attend, queries = LOOKS[text]
    q = queries[layer]
    return lambda rows, columns: attend.weights(q, q, heads=[head], rows=rows, columns=columns)[0, 0]


def read_map(tab: Tab, url: str, text: str, tokens: int, layer: int, head: int, window: int | None) -> int:
    """Read the tips of a map, or of a window in its middle, and of its diagonal."""
    address = f"view=map&attention={layer}&head={head}"
    if window:
        first = tokens // 2 - 3
        address += f"&rows={first}-{first + window}&columns={first - 11}-{first - 11 + window}"
    tab.open(url, address)
    tab.page.wait_for_selector("canvas.plane")
    tab.page.wait_for_timeout(100 if url.startswith("file:") else 400)  # a server is asked for more
    random = torch.Generator().manual_seed(tokens + layer)
    diagonal = [[x, x + 0.002] for x in torch.linspace(0, 0.997, 8).tolist()]
    places = torch.rand(56, 2, generator=random).tolist() + diagonal
    told = tab.page.evaluate(MAP, places)
    for each in told:
        cells(each, weights_of(text, layer, head))
    return len(told)


def read_tokens(tab: Tab, url: str, text: str, layer: int, head: int) -> int:
    tab.open(url, f"view=tokens&attention={layer}&head={head}")
    weights, numbers = weights_of(text, layer, head), 0
    told = tab.page.evaluate(TOKENS, 12)
    assert len(told) == 24
    for side, token, lines in told:
        for line in lines:
            other, shown = int(line.split()[0]), line.split()[-1]
            query, key = (token, other) if side == "query" else (other, token)
            number = weights(slice(query, query + 1), slice(key, key + 1)).item()
            assert is_rounded(shown, number), f"{side} {token}: {line} is {number}"
            numbers += 1
    return numbers


def test_a_thousand_numbers_are_the_weights(opened: Tab, tmp_path: Any) -> None:
    count = 0
    session = Session(recorded, "30 2 3")
    with served(session) as server:
        for tokens, layers, heads in SIZES:
            text = f"{tokens} {layers} {heads}"
            saved = write(tmp_path / f"{tokens}.html", recorded(text).html())
            session.run(text)
            for url in (saved, server):
                for window in (None, 9) if tokens < 200 else (None, 300, 20):
                    count += read_map(opened, url, text, tokens, layers - 1, heads - 1, window)
                count += read_tokens(opened, url, text, layers - 1, 0)
    assert count >= 1000


def test_uniform_attention_has_one_colour_and_one_number(opened: Tab, tmp_path: Any) -> None:
    """At 700 tokens, which no side of a map divides."""
    model = Attends(rg.Attention())
    with capture(model) as record:
        model(torch.zeros(1, 60, 700, 4))
    opened.open(write(tmp_path / "even.html", record.html()), "view=map")
    opened.page.wait_for_selector("canvas.plane")
    opened.settled()
    told = opened.page.evaluate(MAP, torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).tolist())
    assert {re.search(r"eight\s+(\S+)", each)[1] for each in told} == {f"{1 / 700:.6f}"}
    colours = opened.page.evaluate(
        """() => { const canvas = document.querySelector("canvas.plane"), ratio = devicePixelRatio || 1;
        const [w, h] = [canvas.width - 126 * ratio, canvas.height - 94 * ratio];
        const data = canvas.getContext("2d").getImageData(116 * ratio + 4, 84 * ratio + 4, w - 8, h - 8).data;
        const found = new Map();
        for (const each of new Uint32Array(data.buffer)) found.set(each, (found.get(each) ?? 0) + 1);
        return Math.max(...found.values()) / (data.length / 4) }"""
    )
    assert colours > 0.98  # all but the outline of the cell under the pointer


@pytest.mark.parametrize(
    ("shown", "number", "right"),
    [("0.8514", 0.85142, True), ("0.8516", 0.85142, False), ("1.2e-8", 1.23e-8, True), ("0", 0.0, True),
     ("0", 1e-12, False), ("<1e-9", 1e-12, True), ("0.85142", 0.85142, False)],
)  # fmt: skip
def test_the_yardstick(shown: str, number: float, right: bool) -> None:
    assert is_rounded(shown, number) == right
    assert math.isfinite(number)
