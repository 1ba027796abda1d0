"""Read the numbers that a page prints in a browser, and compare each with the weights in every printed digit.

`make tooltips` reads every view of saved pages and of the server at 30, 100, 513 and 5,003 tokens; the tests read some.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor, nn

import regard as rg
from regard.view import Record, capture
from regard.view.server import Session, application, server_config
from tests.view.browser import Tab, launch_browser, write
from tests.view.models import Attends

SIZES = {30: (2, 3), 100: (12, 12), 513: (3, 12), 5003: (1, 2)}  # tokens: layers, heads
PATTERNS = ("causal", "bidirectional", "uniform", "cross")

# Move the pointer to places of a map, in shares of its sides, and read the tooltip at each.
MAP_AT = """([selector, places]) => {
  const canvas = document.querySelector(selector), box = canvas.getBoundingClientRect();
  const [left, top, width, height] = canvas.dataset.plot.split(",").map(Number);
  const read = ([x, y]) => {
    const at = { clientX: box.left + left + x * width, clientY: box.top + top + y * height };
    canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, bubbles: true }));
    return document.querySelector(".tip").innerText;
  };
  return places.map(read) }"""
MAP = f"(places) => ({MAP_AT})(['canvas.plane', places])"
# Point at the first tokens of both columns; read the tooltip, the panel and the numbers next to the other column.
TOKENS = """async (count) => { const found = [];
  const texts = (selector) => [...document.querySelectorAll(selector)].map((one) => one.innerText);
  for (const side of ["query", "key"]) for (let n = 0; n < count; n++) {
    const row = document.querySelectorAll(`.column-${side} .row`)[n], box = row.getBoundingClientRect();
    row.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + 9, clientY: box.y + 9, bubbles: true }));
    for (let tries = 0; tries < 600; tries++) {
      await new Promise((done) => requestAnimationFrame(done));
      const lines = texts(".tip:not([hidden]) .tip-line");
      if (lines.length && lines[0].split(/\\s+/)[1] === String(n) && lines[0].toLowerCase().startsWith(side)) {
        const other = side === "query" ? "key" : "query";
        const column = [...document.querySelectorAll(`.column-${other} .row:not([hidden])`)];
        const values = column.map((one) => `${one.children[0].innerText} ${one.children[2].innerText}`);
        found.push([side, n, lines.slice(1), texts(`.panel-${other} .panel-row`), values]);
        break;
      }
    }
  }
  return found }"""
# With a token pinned, move the pointer over a picture and read the tooltip at each place.
OVER = """([selector, places]) => { const stage = document.querySelector(selector), box = stage.getBoundingClientRect();
  const read = ([x, y]) => {
    const at = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    stage.dispatchEvent(new PointerEvent("pointermove", { ...at, bubbles: true }));
    return document.querySelector(".tip:not([hidden])")?.innerText ?? "";
  };
  return places.map(read) }"""
# The texts of the table of statistics, by attention and head, and the tooltips of the thumbnails.
MATRIX = (
    """() => [...document.querySelectorAll(".matrix [data-head]")].map((one) => [one.dataset.head, one.innerText])"""
)
HEADS = """() => [...document.querySelectorAll(".thumb")].map((one) => {
  one.dispatchEvent(new PointerEvent("pointermove", { clientX: 9, clientY: 9, bubbles: true }));
  return [one.dataset.head, [...document.querySelectorAll(".tip .tip-line")].map((line) => line.innerText)] })"""


class Layers(nn.Module):
    def __init__(self, attend: rg.Attention, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends(attend) for _ in range(layers))

    def forward(self, queries: list[Tensor], keys: list[Tensor | None]) -> None:
        for layer, query, key in zip(self.layers, queries, keys, strict=True):
            layer(query, key)


@dataclass(frozen=True)
class Case:
    """Attention of random queries and keys over some tokens; uniform: of queries that are 0."""

    tokens: int
    pattern: str

    @property
    def keys(self) -> int:
        return self.tokens // 2 + 8 if self.pattern == "cross" else self.tokens

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image, one behind another, after one token or a few."""
        return {30: (4, 5), 100: (5, 11), 513: (13, 20), 5003: (50, 50)}[self.tokens]

    @property
    def text(self) -> str:
        return f"{self.tokens} {self.pattern}"

    def weights(self, layer: int, head: int, rows: slice, columns: slice, temperature: float = 1.0) -> Tensor:
        """(rows, columns), by `Attention.weights`."""
        if self.tokens <= 513:
            return whole_weights(self, layer, temperature)[head, rows, columns]
        attend, queries, keys = inputs(self)
        key = queries[layer] if keys[layer] is None else keys[layer]
        attend = attend.replace(temperature=temperature)
        return attend.weights(queries[layer], key, heads=[head], rows=rows, columns=columns)[0, 0]


@cache
def inputs(case: Case) -> tuple[rg.Attention, list[Tensor], list[Tensor | None]]:
    layers, heads = SIZES[case.tokens]
    random = torch.Generator().manual_seed(case.tokens)
    scale = 0.0 if case.pattern == "uniform" else 1.5
    queries = [scale * torch.randn(1, heads, case.tokens, 8, generator=random) for _ in range(layers)]
    keys = [torch.randn(1, heads, case.keys, 8, generator=random) for _ in range(layers)]
    attend = rg.Attention(mask=rg.causal() if case.pattern == "causal" else None)
    return attend, queries, keys if case.pattern == "cross" else [None] * layers


@cache
def whole_weights(case: Case, layer: int, temperature: float = 1.0) -> Tensor:
    """(heads, queries, keys)"""
    attend, queries, keys = inputs(case)
    attend = attend.replace(temperature=temperature)
    return attend.weights(queries[layer], queries[layer] if keys[layer] is None else keys[layer])[0]


def record_of(case: Case) -> Record:
    """A record that has every view: its keys are patches of an image, and moments of a spectrogram as well."""
    attend, queries, keys = inputs(case)
    model = Layers(attend, len(queries)).eval()
    with capture(model) as record:
        model(queries, keys)
    record.set_spectrogram(torch.rand(50, 8), 10.0)
    return record.set_image(torch.rand(3, 40, 40), case.grid, first=2)


def look(text: str) -> Record:
    tokens, pattern = text.split()
    return record_of(Case(int(tokens), pattern))


@contextmanager
def served(session: Session) -> Iterator[str]:
    import uvicorn

    server = uvicorn.Server(server_config(application(session), 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def is_rounded(shown: str, number: float, *, digits: int = 4, slack: float = 3e-6) -> bool:
    """Whether a text is a number to the digits that it has, up to float32's own rounding."""
    if shown.startswith("<"):
        return 0 < number < float(shown[1:])
    mantissa, _, power = shown.partition("e")
    step = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    if shown == "0":
        return number == 0
    few = len(mantissa.replace(".", "").lstrip("0-")) <= digits
    return few and abs(float(shown) - number) <= step / 2 + slack * abs(number)


def check_cell(
    tip: str, weights: Callable[..., Tensor], word: str = "eight", slack: float = 3e-6, most: float = 0.0
) -> None:
    """A tooltip that names queries and keys, compared with the mean of their weights; most: an absolute tolerance."""
    sides = [re.search(rf"{name} (\d+)(?:–(\d+))?\s", tip) for name in ("Quer(?:y|ies)", "Keys?")]
    parts = [slice(int(side[1]), int(side[2] or side[1]) + 1) for side in sides]
    values = re.findall(r"^((?:Pooled |\w)\w*)\s+(<?-?[\d.]+(?:e-\d+)?)\s*$", tip, re.MULTILINE)
    values = [(name, shown) for name, shown in values if word in name]
    assert len(values) == 1, tip
    name, shown = values[0]
    heights = [part.stop - part.start for part in parts]
    assert name.startswith("Pooled") == (heights != [1, 1]), tip
    if heights != [1, 1]:
        assert f"mean of {heights[0]} x {heights[1]} " in tip, tip
    mean = weights(*parts).double().mean().item()
    near = most > 0 and abs(float(shown.replace("<", "")) - mean) <= most
    assert near or is_rounded(shown, mean, slack=slack), f"{tip}\nis {mean}"


def read_map(tab: Tab, url: str, case: Case, layer: int, head: int, window: int | None = None) -> int:
    """Tooltips of a map, or of a window in its middle, and along its diagonal."""
    address = f"view=map&attention={layer}&head={head}"
    if window:
        row, column = case.tokens // 2 - 3, max(0, min(case.tokens // 2 - 14, case.keys - window))
        address += f"&rows={row}-{row + window}&columns={column}-{column + window}"
    tab.open(url, address)
    tab.page.wait_for_selector("canvas.plane")
    tab.page.wait_for_timeout(100 if url.startswith("file:") else 400)  # a server answers with more
    random = torch.Generator().manual_seed(case.tokens + layer)
    diagonal = [[x, x + 0.002] for x in torch.linspace(0, 0.997, 8).tolist()]
    tips = tab.page.evaluate(MAP, torch.rand(56, 2, generator=random).tolist() + diagonal)
    for tip in tips:
        check_cell(tip, lambda rows, columns: case.weights(layer, head, rows, columns))
    return len(tips)


def read_tokens(tab: Tab, url: str, case: Case, layer: int, head: int, count: int = 8) -> int:
    tab.open(url, f"view=tokens&attention={layer}&head={head}")
    rows_of_text, numbers = tab.page.evaluate(TOKENS, count), 0
    assert len(rows_of_text) == 2 * count
    for side, token, *texts in rows_of_text:
        for line in [line for part in texts for line in part]:
            words = line.split()
            if len(words) < 2:  # a weight that the page does not have
                continue
            other, shown = int(words[0]), words[-1]
            query, key = (token, other) if side == "query" else (other, token)
            number = case.weights(layer, head, slice(query, query + 1), slice(key, key + 1)).item()
            assert is_rounded(shown, number), f"{side} {token}: {line!r} is {number}"
            numbers += 1
    return numbers


def read_over(tab: Tab, url: str, case: Case, view: str, layer: int, head: int, query: int) -> int:
    """Tooltips over the image, or over the spectrogram, of what a pinned query attends to."""
    tab.open(url, f"view={view}&attention={layer}&head={head}&token={query}")
    selector = {"image": ".picture", "sound": ".sound"}[view]
    tab.page.wait_for_selector(selector)
    tab.page.wait_for_function("() => /\\d\\.\\d/.test(document.querySelector('.readout').textContent)")
    places = torch.rand(24, 2, generator=torch.Generator().manual_seed(query)).tolist()
    tips = tab.page.evaluate(OVER, [selector, places])
    rows, columns = case.grid
    for (x, y), tip in zip(places, tips, strict=True):
        if view == "image":
            key = 2 + int(y * rows) * columns + int(x * columns)
        else:
            key = int(x * case.keys)
        if "Pooled" in tip:
            check_cell(tip, lambda rows, columns: case.weights(layer, head, rows, columns))
            continue
        shown = re.search(r"^Weight\s+(\S+)", tip, re.MULTILINE)
        assert shown, tip
        number = case.weights(layer, head, slice(query, query + 1), slice(key, key + 1)).item()
        assert is_rounded(shown[1], number), f"{tip}\nis {number}"
    return len(tips)


@cache
def statistics(case: Case, layer: int, head: int) -> dict[str, float]:
    """Means over the queries, from the weights."""
    _, queries, keys = inputs(case)
    sums: Counter[str] = Counter()
    position = torch.arange(case.keys)
    key = queries[layer] if keys[layer] is None else keys[layer]
    for first in range(0, case.tokens, 500):
        rows = slice(first, min(first + 500, case.tokens))
        weights = case.weights(layer, head, rows, slice(None)).double()
        at = torch.arange(rows.start, rows.stop)[:, None]
        scores = queries[layer][0, head, rows].double() @ key[0, head].double().mT / 8**0.5
        if case.pattern == "causal":
            scores = scores.masked_fill(position > at, -torch.inf)
        sums["Entropy"] -= torch.special.xlogy(weights, weights).sum().item()
        sums["Mean distance"] += (weights * (position - at).abs()).sum().item()
        sums["Max logit"] += scores.amax(-1).sum().item()
        sums["Sink mass"] += weights[:, 0].sum().item()
    shares = {name: value / case.tokens for name, value in sums.items()}
    if case.pattern == "cross":
        del shares["Mean distance"]
    return shares


def is_mean(shown: str, number: float | None) -> bool:
    if number is None:
        return shown == "–"
    step = 10.0 ** -len(shown.partition(".")[2])
    return abs(float(shown) - number) <= step / 2 + 1e-5 * max(1.0, abs(number))


def read_statistics(tab: Tab, url: str, case: Case) -> int:
    numbers = 0
    names = {"entropy": "Entropy", "distance": "Mean distance", "max_logit": "Max logit", "sink": "Sink mass"}
    tab.open(url, "view=statistics")
    for key, name in names.items():
        tab.page.click(f"[role=radio][data-key={key}]")
        cells = tab.page.evaluate(MATRIX)
        for place, shown in cells:
            mean = statistics(case, *map(int, place.split("/"))).get(name)
            assert is_mean(shown, mean), f"{name} of {place}: {shown} is {mean}"
        numbers += len(cells)
    tab.page.click("[data-view=heads]")
    for place, lines in tab.page.evaluate(HEADS):
        shown = {name: line[len(name) :].strip() for line in lines for name in names.values() if line.startswith(name)}
        means = statistics(case, *map(int, place.split("/")))
        assert set(shown) == set(names.values())
        assert all(is_mean(value, means.get(name)) for name, value in shown.items()), (place, shown, means)
        numbers += 4
    return numbers


def rollouts(case: Case) -> Tensor:
    """(layers, n, n) in float64, by the definition."""
    layers, heads = SIZES[case.tokens]
    through, expected = torch.eye(case.tokens, dtype=torch.float64), []
    for layer in range(layers):
        all_heads = [case.weights(layer, head, slice(None), slice(None)).double() for head in range(heads)]
        through = (torch.stack(all_heads).mean(0) + torch.eye(case.tokens, dtype=torch.float64)) / 2 @ through
        expected.append(through)
    return torch.stack(expected)


def read_rollout(tab: Tab, url: str, case: Case) -> int:
    tab.open(url, "view=rollout")
    tab.page.wait_for_selector("canvas.plane")
    tab.wait_frames()
    tips = tab.page.evaluate(MAP, torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).tolist())
    if case.tokens > 512:
        assert all("estimated from pooled maps" in tip for tip in tips)
        return 0
    whole = rollouts(case)[-1]
    for tip in tips:
        check_cell(tip, lambda rows, columns: whole[rows, columns], "hare", slack=1e-5)
    return len(tips)


def read_experiment(tab: Tab, url: str, case: Case, layer: int, head: int) -> int:
    """Tooltips of the map, of one at another temperature and of their difference, and the steps of a weight."""
    hotter = 2.0
    query, key = case.tokens - 3, case.keys // 2
    given = quote(json.dumps({"temperature": [["", hotter]]}))
    address = f"view=experiment&attention={layer}&head={head}&experiment={given}"
    random, numbers = torch.Generator().manual_seed(case.tokens), 0

    def difference(rows: slice, columns: slice) -> Tensor:
        changed, original = (case.weights(layer, head, rows, columns, degree) for degree in (hotter, 1.0))
        return changed.double() - original.double()

    for layout, names in (("both", ("left", "right")), ("difference", ("difference",))):
        tab.open(url, f"{address}&layout={layout}&cell={query}-{key}")
        tab.page.wait_for_selector(f"[data-map={names[-1]}] canvas")
        tab.page.wait_for_selector(".why-side[data-side='1'] .why-line")
        tab.page.wait_for_timeout(400)
        for name in names:
            places = torch.rand(40, 2, generator=random).tolist()
            for tip in tab.page.evaluate(MAP_AT, [f"[data-map={name}] canvas", places]):
                if name == "difference":
                    check_cell(tip, difference, "ifference", most=2e-7)
                else:
                    degree = hotter if name == "right" else 1.0
                    check_cell(tip, lambda rows, columns, t=degree: case.weights(layer, head, rows, columns, t))
                numbers += 1
    return numbers + read_why(tab, case, layer, head, query, key, (1.0, hotter))


def read_why(
    tab: Tab, case: Case, layer: int, head: int, query: int, key: int, temperatures: tuple[float, float]
) -> int:
    """The steps of one weight, from queries and keys in float64, on both sides."""
    _, queries, keys = inputs(case)
    k = (queries if keys[layer] is None else keys)[layer][0, head].double()  # type: ignore[index]
    products = k @ queries[layer][0, head, query].double()
    scores = products / 8**0.5
    if case.pattern == "causal":
        scores[query + 1 :] = -torch.inf
    for side, temperature in enumerate(temperatures):
        lines = tab.page.eval_on_selector_all(
            f".why-side[data-side='{side}'] .why-line",
            "(all) => all.map((one) => [...one.children].map((part) => part.innerText))",
        )
        shown = {line[0]: line[1].lstrip("×÷+ ") for line in lines}
        logits = scores / temperature
        weight = case.weights(layer, head, slice(query, query + 1), slice(key, key + 1), temperature).item()
        length = k[key].norm().item()  # values are keys
        expected = {
            "Product": products[key], "Scale": 8**-0.5, "Score": scores[key], "Temperature": temperature,
            "Logit": logits[key], "Log-sum-exp": logits.logsumexp(0), "Weight": weight, "Value length": length,
            "Contribution": weight * length,
        }  # fmt: skip
        for name, number in expected.items():
            assert is_rounded(shown[name], float(number)), (name, shown[name], float(number))
    return len(temperatures) * len(expected)


def read_all(tab: Tab, url: str, case: Case) -> Counter[str]:
    """Every view of a page. The counts of the numbers that were compared, by view."""
    layers, heads = SIZES[case.tokens]
    layer, head, counts = layers - 1, heads - 1, Counter[str]()
    windows = (None, 9) if case.tokens < 200 else (None, 200, 20)
    for window in windows:
        counts["map"] += read_map(tab, url, case, layer, head, window)
    counts["tokens"] += read_tokens(tab, url, case, layer, 0)
    for view in ("image", "sound"):
        counts[view] += read_over(tab, url, case, view, layer, head, case.tokens // 3)
    counts["statistics"] += read_statistics(tab, url, case)
    if case.pattern != "cross":
        counts["rollout"] += read_rollout(tab, url, case)
    return counts


def main() -> None:
    total = Counter[str]()
    session = Session(look, "30 causal")
    with tempfile.TemporaryDirectory() as folder, served(session) as server, launch_browser() as browser:
        tab = Tab(browser)
        for tokens in SIZES:
            for pattern in PATTERNS:
                case = Case(tokens, pattern)
                saved = write(Path(folder) / "page.html", record_of(case).html())
                session.run(case.text)
                counts = read_all(tab, saved, case) + read_all(tab, server, case)
                counts["experiment"] += read_experiment(tab, server, case, SIZES[tokens][0] - 1, SIZES[tokens][1] - 1)
                total += counts
                print(f"{case.text:20}", *(f"{view} {count}" for view, count in counts.items()), flush=True)
                assert tab.errors == []
                for cached in (inputs, whole_weights, statistics):
                    cached.cache_clear()
    print(f"{sum(total.values()):,} numbers, each equal to the weights in every printed digit: {dict(total)}")


if __name__ == "__main__":
    main()
