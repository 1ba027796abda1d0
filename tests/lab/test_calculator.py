"""The calculator in a browser: every printed digit is that of the definition, of the library and of autograd."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.lab.calculator import calculator
from tests.conftest import Command
from tests.view.browser import Tab, launch_browser, write

Numbers = list[list[float]]
CASES: dict[str, tuple[Numbers, list[list[bool]], float]] = {
    "one": ([[1, 2, 3, 4, 5, 6]], [[True]], 1.0),
    "hidden": ([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], [[False, False], [True, False]], 1.0),
    "extreme": (
        [[1e6, 0, 1e6, 0, 1e6, -1e6], [-1e6, 1, 0, 1e6, -1e6, 1e6], [0, 0, 0, 0, 1e-6, 0]], [[True] * 3] * 3, 1.0,
    ),
    "cold": ([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, -1, 0, -1, 0.5]], [[True] * 3] * 3, 1e-6),
    "hot": ([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, -1, 0, -1, 0.5]], [[True] * 3] * 3, 1e6),
    "saturated": ([[30, 0, 30, 0, 1, 0], [0, 30, 0, 30, 0, 1], [-30, 0, -30, 0, -1, 0]], [[True] * 3] * 3, 1.0),
    "ties": ([[2, 2, 2, 2, 1, 0]] * 8, [[True] * 8] * 8, 1.0),
}  # fmt: skip


def random_case(seed: int) -> tuple[Numbers, list[list[bool]], float]:
    draw = random.Random(seed)
    count = draw.randint(2, 8)
    tokens = [[draw.gauss(0, 2) for _ in range(6)] for _ in range(count)]
    mask = [[draw.random() < 0.7 for _ in range(count)] for _ in range(count)]
    return tokens, mask, draw.choice([0.1, 0.5, 1.0, 3.0])


CASES |= {f"random {seed}": random_case(seed) for seed in range(6)}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with launch_browser() as browser:
        opened = Tab(browser)
        opened.url = write(tmp_path_factory.mktemp("calculator") / "calculator.html", calculator())
        yield opened
        assert opened.errors == []


@pytest.fixture
def page(tab: Tab) -> Any:
    tab.page.goto("about:blank")
    tab.page.goto(tab.url)
    return tab.page


def enter(page: Any, tokens: Numbers, mask: list[list[bool]], temperature: float) -> None:
    page.select_option("#count", str(len(tokens)))
    page.fill("#temperature", repr(temperature))
    for i, row in enumerate(tokens):
        for d, number in enumerate(row):
            page.fill(f'[data-field="{i},{d}"]', repr(number))
    for i, seen in enumerate(mask):
        for j, visible in enumerate(seen):
            if (page.get_attribute(f'[data-cell="{i},{j}"]', "aria-pressed") == "true") != visible:
                page.click(f'[data-cell="{i},{j}"]')


def read(page: Any, name: str) -> list[list[str]]:
    rows = page.evaluate(
        "(name) => [...document.querySelectorAll(`#${name} tr`)].slice(1).map((row) => "
        "[...row.querySelectorAll('td')].map((cell) => cell.textContent))",
        name,
    )
    return [[text.replace("\N{MINUS SIGN}", "-") for text in row] for row in rows]


def printed(x: Any) -> str:
    """Return a number as the page prints it, rounded from its exact value."""
    x = Decimal(float(x)) if not isinstance(x, Decimal) else x
    if x.is_infinite():
        return "-∞"
    size, sign = abs(x), "-" if x < 0 else ""
    if size < Decimal("1e-300"):
        return "0.0000"
    if Decimal("5e-5") <= size < Decimal("1e5"):
        return f"{sign}{size.quantize(Decimal('0.0001'), ROUND_HALF_UP)}"
    power = size.adjusted()
    digits = size.scaleb(-power).quantize(Decimal("0.001"), ROUND_HALF_UP)
    if digits >= 10:
        digits, power = digits / 10, power + 1
    return f"{sign}{digits:.3f}e{'+' if power >= 0 else '-'}{abs(power)}"


def total(terms: list[Decimal]) -> Decimal:
    """Return a sum, or 0 if its terms cancel so far that double precision has no digits of it."""
    result = sum(terms, Decimal(0))
    return Decimal(0) if abs(result) < Decimal("1e-11") * sum(map(abs, terms), Decimal(0)) else result


def exact(tokens: Numbers, mask: list[list[bool]], temperature: float, chosen: int, component: int) -> dict[str, Any]:
    """Compute all that the page shows with 700 digits."""
    with localcontext() as context:
        context.prec = 700
        rows = [[Decimal(float(x)) for x in row] for row in tokens]
        scale, n = 1 / (Decimal(2).sqrt() * Decimal(temperature)), range(len(tokens))
        scores = [[a[0] * b[2] + a[1] * b[3] for b in rows] for a in rows]
        logits = [[scores[i][j] * scale if mask[i][j] else Decimal("-inf") for j in n] for i in n]
        weights = []
        for row in logits:
            seen = [x for x in row if x.is_finite()]
            raised = [(x - max(seen)).exp() if x.is_finite() else Decimal(0) for x in row]
            weights.append([x / sum(raised) if seen else Decimal(0) for x in raised])
        values = [row[4:] for row in rows]
        outputs = [[total([w * v[e] for w, v in zip(row, values, strict=True)]) for e in range(2)] for row in weights]
        w, v = weights[chosen], [value[component] for value in values]
        jacobian = [[w[j] * (sum(w) - w[j] if j == m else -w[m]) for m in n] for j in n]
        slopes = [w[j] * total([w[m] * (v[j] - v[m]) for m in n]) for j in n]
        query = [scale * total([slopes[j] * rows[j][2 + d] for j in n]) for d in range(2)]
        zero = Decimal(0)
        gradient = [
            [slopes[j], *(scale * slopes[j] * rows[chosen][d] for d in range(2)),
             *(w[j] if e == component else zero for e in range(2)), *(query if j == chosen else [zero, zero])]
            for j in n
        ]  # fmt: skip
        return {"scores": scores, "logits": logits, "weights": weights, "outputs": outputs, "jacobian": jacobian,
                "gradient": gradient}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_digit_is_that_of_the_definition(page: Any, name: str) -> None:
    tokens, mask, temperature = CASES[name]
    enter(page, tokens, mask, temperature)
    for chosen in {0, len(tokens) - 1}:
        page.click(f"#mask tr:nth-child({chosen + 2}) th button")
        for component in (0, 1):
            page.select_option("#component", index=component)
            expected = exact(tokens, mask, temperature, chosen, component)
            for part, rows in expected.items():
                shown = read(page, part)
                if part == "weights":
                    assert [row.pop() for row in shown] == [printed(float(any(row))) for row in mask]
                assert shown == [[printed(x) for x in row] for row in rows], part
    assert "NaN" not in page.inner_text("body")


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("extreme", "cold", "saturated")])
def test_the_library_and_autograd_print_the_same(page: Any, name: str) -> None:
    tokens, mask, temperature = CASES[name]
    temperature = max(temperature, 3.0)  # autograd subtracts nearly equal numbers where the softmax is saturated
    enter(page, tokens, mask, temperature)
    chosen = len(tokens) - 1
    page.click(f"#mask tr:nth-child({chosen + 2}) th button")
    q, k, v = (part.contiguous().requires_grad_() for part in torch.tensor(tokens, dtype=torch.float64).split(2, -1))
    attend = rg.Attention(mask=torch.tensor(mask), temperature=temperature)
    weights, output = attend.weights(q, k), attend(q, k, v)
    assert [row[:-1] for row in read(page, "weights")] == table(weights)
    assert read(page, "outputs") == table(rounded(output))
    to_q, to_k, to_v = torch.autograd.grad(output[chosen, 0], (q, k, v))
    gradient = read(page, "gradient")
    assert [row[1:3] for row in gradient] == table(rounded(to_k))
    assert [row[3:5] for row in gradient] == table(rounded(to_v))
    assert [row[5:7] for row in gradient] == table(rounded(to_q))
    logits = (q @ k.mT / 2**0.5 / temperature).masked_fill(~torch.tensor(mask), -torch.inf)[chosen].detach()
    seen = logits.isfinite()
    jacobian = torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
    if seen.any():
        jacobian[seen.outer(seen)] = torch.func.jacrev(lambda row: row.softmax(-1))(logits[seen]).flatten()
    assert read(page, "jacobian") == table(rounded(jacobian))


def rounded(x: Tensor) -> Tensor:
    """Set entries that are rounding errors to 0."""
    return torch.where(x.abs() < 1e-14, 0.0, x.detach())


def table(x: Tensor) -> list[list[str]]:
    return [[printed(entry) for entry in row] for row in x.tolist()]


def test_invalid_input_is_named_and_gives_no_nan(page: Any) -> None:
    before = read(page, "weights")
    for text in ("abc", "", "1e999", "NaN", "--1", "2000000", "1 2"):
        page.fill('[data-field="1,2"]', text)
        assert page.inner_text("#message") == (
            f"k1 of token 2 must be a number from -1,000,000 to 1,000,000, but is “{text}”; 0 is used instead."
        )
        assert page.get_attribute('[data-field="1,2"]', "aria-invalid") == "true"
        assert read(page, "weights") == before
    page.fill("#temperature", "0")
    assert "The temperature must be a number from 0.000001" in page.inner_text("#message")
    page.click("#lang")
    assert "温度应为" in page.inner_text("#message")
    assert page.input_value('[data-field="1,2"]') == "1 2"
    page.fill("#temperature", "0,5")
    page.fill('[data-field="1,2"]', "−.5")
    assert page.inner_text("#message") == ""
    assert read(page, "scores")[0][1] == "-0.5000"
    assert "NaN" not in page.inner_text("body")


def test_a_query_without_keys_says_so(page: Any) -> None:
    page.click('[data-mask="hidden"]')
    assert page.inner_text("#message") == "Query 1 sees no key: its weights, output and gradients are 0."
    assert read(page, "weights")[0] == ["0.0000"] * 5
    assert {text for row in read(page, "jacobian") + read(page, "gradient") for text in row} == {"0.0000"}
    assert page.locator("#hull polygon").count() == 0
    page.click('[data-mask="causal"]')
    assert page.inner_text("#message") == ""
    assert [row.count("-∞") for row in read(page, "logits")] == [3, 2, 1, 0]


def test_both_languages_have_the_same_words(page: Any) -> None:
    words = page.evaluate("() => document.querySelector('script[type=module]').textContent.split('\\n')[0]")
    both = json.loads(words.removeprefix("const WORDS = ").removesuffix(";"))
    assert both["en"].keys() == both["zh"].keys()
    assert page.evaluate("document.documentElement.lang") == "en"
    page.click("#lang")
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    assert page.inner_text("h1") == "注意力计算器"
    page.reload()
    assert page.inner_text("h1") == "注意力计算器"


def test_the_hull_is_that_of_the_visible_values(page: Any) -> None:
    page.select_option("#example", "equal")
    assert page.get_attribute("#hull circle.out.chosen", "cx") == "200"  # the mean of four values around 0
    assert len(page.get_attribute("#hull polygon", "points").split()) == 4
    page.click('[data-cell="0,2"]')
    assert len(page.get_attribute("#hull polygon", "points").split()) == 3
    box = page.evaluate(
        "(() => { const { x, y } = document.querySelector('#hull circle.out.chosen').getBBox(); return x && y })()"
    )
    assert box


def test_the_keyboard_keeps_its_place(page: Any) -> None:
    for selector in ('[data-query="2"]', '[data-cell="1,0"]', '[data-mask="window"]', "#lang"):
        page.focus(selector)
        page.keyboard.press("Enter")
        assert page.evaluate("(selector) => document.activeElement.matches(selector)", selector), selector
    assert page.get_attribute('[data-query="2"]', "aria-pressed") == "true"
    assert page.get_attribute('[data-query="0"]', "aria-pressed") == "false"


@pytest.mark.parametrize("change", ["number", "temperature", "count", "cell", "mask"])
def test_an_example_can_be_chosen_again_after_a_change(page: Any, change: str) -> None:
    before = page.inner_html("main")
    {
        "number": lambda: page.fill('[data-field="0,0"]', "9"),
        "temperature": lambda: page.fill("#temperature", "0"),
        "count": lambda: page.select_option("#count", "2"),
        "cell": lambda: page.click('[data-cell="0,1"]'),
        "mask": lambda: page.click('[data-mask="causal"]'),
    }[change]()
    assert page.input_value("#example") == ""
    assert page.locator("#example option:checked").inner_text() == "Your numbers"
    page.select_option("#example", "first")
    assert page.inner_html("main") == before


def test_the_jacobian_of_a_saturated_softmax_is_pale(page: Any) -> None:
    def opacity() -> float:
        return page.evaluate(
            "Math.max(...[...document.querySelectorAll('#jacobian td')].map((cell) => "
            "Number(cell.style.backgroundColor.match(/([\\d.e-]+)\\)$/)[1])))"
        )

    page.select_option("#example", "equal")
    assert opacity() > 0.4
    page.select_option("#example", "saturated")
    assert opacity() < 0.01


def test_it_is_one_page_written_by_the_command(tmp_path: Path, regard: Command) -> None:
    assert regard("lab", "--calculator", "-o", tmp_path / "calculator.html").code == 0
    text = (tmp_path / "calculator.html").read_text("utf-8")
    assert text == calculator()
    assert "default-src 'none'" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    done = regard("lab", "--calculator", "variance")
    assert done.code == 1
    assert "measures no claim" in done.err
