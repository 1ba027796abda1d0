"""Experiments in a browser: every interaction of the live page, each number compared with `Attention.weights`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import tokenizers
import torch
from torch import Tensor

import regard as rg
from regard.view import Change, Record, capture, capture_text
from regard.view.server import Session
from tests.view.browser import Tab
from tests.view.tooltips import is_rounded, served

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "bird", "tree", "near", "old", "red"]
TEXT = "the cat sat on a mat and the cat saw"
LAYERS, HEADS = 2, 3
# The screen position of a cell of a map that shows rows x columns.
PLACE = """(map, [row, column], rows, columns) => {
  const canvas = document.querySelector(`[data-map=${map}] canvas.plane`) ?? document.querySelector("canvas.plane");
  const [left, top, width, height] = canvas.dataset.plot.split(",").map(Number);
  const box = canvas.getBoundingClientRect();
  return [canvas, box.left + left + (column + 0.5) * width / columns, box.top + top + (row + 0.5) * height / rows] }"""
# Tooltips of a map at given cells.
READ = f"""([map, cells, rows, columns]) => cells.map((cell) => {{
  const [canvas, clientX, clientY] = ({PLACE})(map, cell, rows, columns);
  canvas.dispatchEvent(new PointerEvent("pointermove", {{ clientX, clientY, bubbles: true }}));
  return [...document.querySelectorAll(".tip:not([hidden]) .tip-value")].map((one) => one.innerText) }})"""
TEXTS = "(rows) => rows.map((row) => [...row.children].map((cell) => cell.innerText))"


def tokenizer() -> Any:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="the")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def language_model(seed: int) -> rg.models.LanguageModel:
    torch.manual_seed(seed)
    config = rg.models.LanguageConfig(len(WORDS), d_model=24, layers=LAYERS, heads=HEADS, d_hidden=32)
    model = rg.models.LanguageModel(config).eval()
    for name, each in model.named_parameters():  # larger weights, so that heads differ
        if "qkv" in name:
            each.data.mul_(2.5)
    return model


MODEL, SECOND = language_model(0), language_model(1)


def look(text: str) -> Record:
    return capture_text(MODEL, tokenizer(), text)


def capture_ids(ids: Tensor) -> Record:
    with torch.no_grad(), capture(MODEL) as record:
        MODEL(ids[None])
    return record.decode(tokenizer())


@pytest.fixture(scope="module")
def base() -> Record:
    return look(TEXT)


@pytest.fixture(scope="module")
def session() -> Session:
    return Session(look, TEXT, against=lambda text: capture_text(SECOND, tokenizer(), text))


@pytest.fixture(scope="module")
def url(session: Session) -> Iterator[str]:
    with served(session) as address:
        yield address


@pytest.fixture(scope="module")
def shared(browser: Any) -> Iterator[Tab]:
    opened = Tab(browser)
    yield opened
    opened.context.close()


@pytest.fixture
def live(shared: Tab, session: Session, url: str) -> Iterator[Callable[[str], Tab]]:
    session.run(TEXT)

    def open_(address: str) -> Tab:
        shared.open(url, address)
        settle(shared)
        return shared

    yield open_
    assert shared.errors == []


def settle(tab: Tab) -> None:
    """Wait until the view shows the answers to what was asked."""
    tab.page.wait_for_function(
        "() => !document.querySelector('.view-experiment')?.dataset.busy && !document.querySelector('[data-stale]') &&"
        " document.querySelector('.view-experiment')?.dataset.busy === undefined"
    )
    tab.page.wait_for_timeout(60)
    tab.wait_frames()


def experiment(entries: dict[str, list], **more: str) -> str:
    given = "".join(f"&{name}={value}" for name, value in more.items())
    return f"view=experiment&attention=1&head=2&experiment={quote(json.dumps(entries))}{given}"


def check_map(tab: Tab, name: str, expected: Tensor, cells: list[list[int]] | None = None) -> None:
    rows, columns = expected.shape
    cells = cells or [[row, row * 3 % (row + 1)] for row in range(rows)] + [[rows - 1, n] for n in range(columns)]
    texts = tab.page.evaluate(READ, [name, cells, rows, columns])
    for (row, column), (shown,) in zip(cells, texts, strict=True):
        number = expected[row, column].item()
        slack = 2e-7 if name == "difference" else 0
        close = abs(float(shown.replace("<", "")) - number) <= slack  # a small difference of two float32 numbers
        assert is_rounded(shown, number) or close, (row, column, shown, number, tab.texts(".chip span"))


def check_prediction(tab: Tab, ours: Record, theirs: Record | None, position: int) -> None:
    columns = [
        each.output.values[0, position].double().softmax(-1)
        for each in (ours, theirs)
        if each is not None and each.output
    ]
    indices = tab.page.eval_on_selector_all(".prediction tbody tr", "(rows) => rows.map((row) => +row.dataset.index)")
    texts = tab.page.eval_on_selector_all(".prediction tbody tr", TEXTS)
    rows = [(index, text, shown) for index, (text, *shown) in zip(indices, texts, strict=True)]
    assert len(rows) >= 8
    for index, text, shown in rows:
        assert text == WORDS[index]
        assert len(shown) == len(columns)
        assert all(is_rounded(one, column[index].item()) for one, column in zip(shown, columns, strict=True)), rows
    best = columns[0].topk(8).indices.tolist()
    assert [index for index, *_ in rows[:8]] == best


def move_slider(tab: Tab, position: int) -> None:
    tab.page.eval_on_selector(
        ".prediction .slider", f"(one) => {{ one.value = {position}; one.dispatchEvent(new Event('input')) }}"
    )


def pick(tab: Tab, row: int, column: int, size: int, name: str = "left") -> None:
    place = tab.page.evaluate(f"(given) => ({PLACE})(...given).slice(1)", [name, [row, column], size, size])
    tab.page.mouse.click(*place)
    settle(tab)


def test_heads_temperature_pairs_and_tokens_change_map_and_prediction(live: Callable[[str], Tab], base: Record) -> None:
    tab = live("view=experiment&attention=1&head=2")
    n = len(TEXT.split())
    check_map(tab, "left", base.weights(1, 2))
    check_prediction(tab, base, None, n - 1)
    assert not tab.page.is_visible("[data-map=right]")
    changes: list[Change] = []

    def check(*new: Change, tokens: dict[int, str] | None = None) -> Record:
        settle(tab)
        changes.extend(new)
        changed = base.ablate(*changes, tokens=tokens)
        check_map(tab, "right", changed.weights(1, 2))
        check_map(tab, "left", base.weights(1, 2))
        check_prediction(tab, base, changed, n - 1)
        return changed

    tab.page.click("[data-switch='0/1']")
    changed = check(Change(layer=0, head=1, factor=0.0))
    assert (changed.weights(1, 2) - base.weights(1, 2)).abs().max() > 1e-3  # the numbers are those of another model
    tab.page.click("[data-layer='1']")  # all heads of a layer off
    check(Change(layer=1, factor=0.0))
    tab.page.click("[data-layer='1']")
    changes.pop()
    tab.page.eval_on_selector(
        "[data-act=temperature]", "(one) => { one.value = 1; one.dispatchEvent(new Event('input')) }"
    )
    tab.page.wait_for_function("() => document.querySelector('[data-change=temperature]')")
    check(Change(temperature=2.0))
    pick(tab, 6, 3, n)
    assert tab.page.inner_text(".changes .pair").split() == ["Query", "6", "and", "→", "Key", "3", "on"]
    tab.page.click("[data-act=forbid]")
    assert check(Change(layer=1, head=2, forbid=[(6, 3)])).weights(1, 2)[6, 3] == 0
    pick(tab, 4, 9, n)  # a future token, which the mask hides
    tab.page.select_option("[data-scope=pairs]", "all")
    tab.page.click("[data-act=force]")
    assert check(Change(force=[(4, 9)])).weights(0, 1)[4, 9] == 1
    tab.page.fill(".place", "2")
    assert tab.page.input_value(".changes .token") == "sat"
    tab.page.fill(".changes .token", "saw")
    tab.page.press(".changes .token", "Enter")
    check(tokens={2: "saw"})
    chips = ["0·1 off", "temperature 2.000, all layers", "forbid 6 and → 3 on, 1·2", "force 4 a → 9 saw, all layers"]
    assert tab.texts(".chip span") == [*chips, "token 2: sat → saw"]
    tab.page.fill(".changes .token", "two words")
    tab.page.press(".changes .token", "Enter")
    tab.page.wait_for_selector(".status.failed")
    assert "must be one token" in tab.page.inner_text(".status")
    assert not tab.page.is_visible("[data-map=right]")  # no stale map
    tab.errors.clear()  # the browser reports the refused request
    tab.page.click("[data-change=edits] button")
    check()
    tab.page.click("[data-act=reset]")
    settle(tab)
    assert not tab.page.is_visible("[data-map=right]")
    assert tab.texts(".chip") == []


def test_a_link_restores_text_and_experiment(live: Callable[[str], Tab], base: Record, session: Session) -> None:
    entries = {
        "off": [["0", 0]],
        "temperature": [["1", 0.5]],
        "forbid": [["1", 2, 5, 1]],
        "edits": [["source", 1, "dog"]],
    }
    tab = live(experiment(entries, text=quote(TEXT), layout="difference", position="4"))
    link = tab.page.evaluate("() => location.href")
    session.run("a red bird and a tree")  # the server now shows another text
    tab.open(link.partition("#")[0], link.partition("#")[2])
    tab.page.wait_for_function("(text) => document.querySelector('textarea').value === text", arg=TEXT)
    settle(tab)
    changed = base.ablate(
        Change(layer=0, head=0, factor=0.0), Change(layer=1, temperature=0.5), Change(layer=1, head=2, forbid=[(5, 1)]),
        tokens={1: "dog"},
    )  # fmt: skip
    check_map(tab, "difference", changed.weights(1, 2) - base.weights(1, 2))
    check_prediction(tab, base, changed, 4)
    assert tab.page.inner_text(".slider-label") == "after 4: a"
    for bad in (
        '{"off": [["0", 99]]}',
        "[1",
        '{"off": 3}',
        '{"off": [["9", 0]]}',
        '{"forbid": [["cross", -1, 0, 0]]}',
        '{"forbid": [["", -1, 0, 0]]}',
    ):  # ignored, like every invalid state
        live(f"view=experiment&experiment={quote(bad)}")
        assert tab.texts(".chip") == []


def test_a_copied_link_restores_the_text_of_every_view(live: Callable[[str], Tab], session: Session) -> None:
    tab = live("view=map&attention=1&head=2")
    text = "the dog saw a bird"
    tab.page.fill("textarea", text)
    tab.page.wait_for_function("() => document.querySelector('[data-stale]') === null", timeout=60_000)
    tab.page.wait_for_timeout(400)
    assert "text=" not in tab.page.evaluate("() => location.hash")
    tab.page.click("[data-act=link]")
    address = tab.page.evaluate("() => location.hash").removeprefix("#")
    session.run(TEXT)
    tab = live(address)
    tab.page.wait_for_function(f"() => document.querySelector('textarea').value === '{text}'")
    settle(tab)
    tab.page.wait_for_selector("canvas.plane")
    check_map(tab, "left", look(text).weights(1, 2))


def test_other_heads_texts_and_models_side_by_side(live: Callable[[str], Tab], base: Record) -> None:
    tab = live("view=experiment&attention=1&head=2&compare=head&second=0-1")
    check_map(tab, "right", base.weights(0, 1))
    tab.page.select_option("[data-second=layer]", "1")
    tab.page.select_option("[data-second=head]", "0")
    settle(tab)
    check_map(tab, "right", base.weights(1, 0))
    tab.page.click("[data-key=difference]")
    settle(tab)
    check_map(tab, "difference", base.weights(1, 0) - base.weights(1, 2))
    tab.page.click("[data-key=text]")
    other = "the dog sat on a tree and the cat saw"
    tab.page.fill(".other-text", other)
    tab.page.press(".other-text", "Tab")
    settle(tab)
    check_map(tab, "difference", look(other).weights(1, 2) - base.weights(1, 2))
    tab.page.click("[data-key=both]")
    tab.page.fill(".other-text", "the dog saw")
    tab.page.press(".other-text", "Tab")
    settle(tab)
    shorter = look("the dog saw")
    check_map(tab, "right", shorter.weights(1, 2))
    check_prediction(tab, base, shorter, -1)  # the last token of each
    assert tab.page.inner_text(".slider-label") == "after 9: saw | 2: saw"
    move_slider(tab, 1)
    tab.page.wait_for_function("() => document.querySelector('.slider-label').textContent === 'after 1: cat | 1: dog'")
    settle(tab)
    check_prediction(tab, base, shorter, 1)
    move_slider(tab, 9)
    settle(tab)
    tab.page.click("[data-key=difference]")
    settle(tab)
    assert "different numbers of tokens" in tab.page.inner_text(".status")
    tab.page.click("[data-key=both]")
    tab.page.click("[data-key=model]")
    settle(tab)
    second = capture_text(SECOND, tokenizer(), TEXT)
    check_map(tab, "right", second.weights(1, 2))
    check_prediction(tab, base, second, len(TEXT.split()) - 1)


@pytest.mark.parametrize(
    ("link", "title", "shown"), [("0-99", "Layer 0, head 0", (0, 0)), ("77-1", "Layer 1, head 2", (1, 2))]
)
def test_a_head_to_compare_with_that_does_not_exist_is_replaced(
    live: Callable[[str], Tab], base: Record, link: str, title: str, shown: tuple[int, int]
) -> None:
    tab = live(f"view=experiment&attention=1&head=2&compare=head&second={link}")
    assert tab.texts("[data-map=right] h3") == [title]
    check_map(tab, "right", base.weights(*shown))
    assert tab.page.input_value("[data-second=head]") == title[-1]


def test_generation_with_beams_and_a_slider_over_its_steps(live: Callable[[str], Tab], base: Record) -> None:
    tab = live(experiment({"off": [["0", 1]]}))
    tab.page.fill(".generate input >> nth=0", "5")
    tab.page.fill(".generate input >> nth=1", "3")
    tab.page.click("[data-act=generate]")
    tab.page.wait_for_function("() => document.querySelectorAll('.beam').length === 6")
    changed = base.ablate(Change(layer=0, head=1, factor=0.0))
    beams = [*base.generate(5, 3), *changed.generate(5, 3)]
    for shown, beam in zip(tab.texts(".beam"), beams, strict=True):
        assert shown.startswith(beam.note)
        assert is_rounded(shown.removeprefix(beam.note), beam.score)
    tab.page.click(".beam >> nth=1")
    tab.page.wait_for_function("() => document.querySelector('.prediction .slider').max === '14'")
    settle(tab)
    assert tab.page.get_attribute(".prediction .slider", "min") == "9"  # the last token of the prompt
    chosen = beams[1]
    check_map(tab, "left", chosen.weights(1, 2))
    for step in (9, 11):
        move_slider(tab, step)
        label = f"after {step}: {chosen.streams['source'].tokens[step].strip()}"
        tab.page.wait_for_function("(text) => document.querySelector('.slider-label').textContent === text", arg=label)
        settle(tab)
        check_prediction(tab, chosen, chosen.ablate(*changed.changes), step)


def test_a_temperature_between_the_steps_of_the_slider_is_shown_as_it_is(live: Callable[[str], Tab]) -> None:
    tab = live(experiment({"temperature": [["", 1.5]]}))
    assert tab.texts(".degree") == ["1.500"]


def test_a_saved_picture_names_both_maps_and_the_changes(live: Callable[[str], Tab], tmp_path: Any) -> None:
    tab = live(experiment({"off": [["0", 1]], "temperature": [["", 2]]}))
    with tab.page.expect_download() as download:
        tab.page.click("[data-act=svg]")
    download.value.save_as(tmp_path / "out.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "out.svg").read_text("utf-8"))
    plain = [text.strip("\u2068\u2069") for text in texts]
    assert [each for each in plain if each in ("Original", "Changed")] == ["Original", "Changed"]
    assert plain[-2:] == ["0·1 off", "temperature 2.000, all layers"]
    widths = [int(each) for each in re.findall(r'<svg[^>]* width="(\d+)"', (tmp_path / "out.svg").read_text("utf-8"))]
    assert widths[1] == widths[2] + widths[3]


def test_the_likely_tokens_of_a_note_are_readable() -> None:
    words = ["a", "\n", "\u05d0\u05d1", "\u202eb", " "]
    names = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    config = rg.models.LanguageConfig(len(words), d_model=8, layers=1, heads=1, d_hidden=8)
    note = capture_text(rg.models.LanguageModel(config).eval(), names, "a").note.removeprefix("next: ")
    shown = [each.rpartition(" ")[0] for each in note.split(", ")]
    assert sorted(shown) == sorted(["a", "⏎", "\u2068\u05d0\u05d1\u2069", "\u2068\u202eb\u2069", "␣"])


def test_a_note_names_special_tokens_and_small_probabilities() -> None:
    names = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    names.add_special_tokens(["<end>"])
    config = rg.models.LanguageConfig(4, d_model=8, layers=1, heads=1, d_hidden=8)
    model = rg.models.LanguageModel(config).eval()
    model.logits = lambda x: torch.tensor([2.0, 1.0, -9.0, 3.0]).expand(*x.shape[:2], 4)  # type: ignore[assignment]
    assert capture_text(model, names, "a").note == "next: <end> 67%, a 24%, b 9%, c <1%"


def test_labels_above_a_map_fit_into_it(live: Callable[[str], Tab]) -> None:
    tab = live("view=experiment&attention=1&head=2")
    room = tab.page.eval_on_selector(
        "[data-map=left] canvas",
        """(canvas) => { const [left, , width] = canvas.dataset.plot.split(",").map(Number);
        return canvas.getBoundingClientRect().width - left - width }""",
    )
    assert room >= 10 * 6 * math.cos(math.radians(55))  # ten letters, rotated


def test_a_server_that_was_started_again_gets_the_text_again(
    live: Callable[[str], Tab], base: Record, session: Session
) -> None:
    tab = live("view=experiment&attention=1&head=2")
    session.records.clear()
    session.derived.clear()
    tab.page.click("[data-switch='0/1']")
    tab.page.wait_for_selector("[data-map=right]")
    settle(tab)
    check_map(tab, "right", base.ablate(Change(layer=0, head=1, factor=0.0)).weights(1, 2))
    assert tab.page.inner_text(".status") == ""
    tab.page.route("**/api/**", lambda route: route.abort())
    tab.page.click("[data-switch='0/2']")
    tab.page.wait_for_selector(".status.failed")
    assert "the server does not answer" in tab.page.inner_text(".status")
    assert not tab.page.is_visible("[data-map=left]")  # nothing stale, nothing that computes for ever
    tab.page.unroute("**/api/**")
    tab.page.click("[data-switch='0/2']")
    tab.page.wait_for_selector("[data-map=right]")
    settle(tab)
    check_map(tab, "right", base.ablate(Change(layer=0, head=1, factor=0.0)).weights(1, 2))
    tab.page.fill("textarea >> nth=0", "  ")
    assert tab.page.inner_text(".busy") == "Type a text to see its attention."
    tab.errors.clear()  # the browser reports refused and failed requests


def test_a_beam_of_a_changed_model_is_compared_with_the_original_one(live: Callable[[str], Tab], base: Record) -> None:
    tab = live(experiment({"temperature": [["", 2]], "edits": [["source", 1, "dog"]]}))
    tab.page.fill(".generate input >> nth=0", "5")
    tab.page.fill(".generate input >> nth=1", "3")
    tab.page.click("[data-act=generate]")
    tab.page.wait_for_function("() => document.querySelectorAll('.beam').length === 6")
    beam = base.ablate(Change(temperature=2.0), tokens={1: "dog"}).generate(5, 3)[0]
    assert beam.call is not None
    ids = beam.call.ids("source")
    original = capture_ids(ids)
    for _ in range(5):  # each click opens a record; they never displace that of the text
        tab.page.click(".beam >> nth=3")
        tab.page.wait_for_selector("[data-act=back]")
        settle(tab)
        assert tab.texts(".chip span") == ["temperature 2.000, all layers"]  # the edit is a part of the beam
        check_map(tab, "left", original.weights(1, 2))
        check_map(tab, "right", beam.weights(1, 2))
        check_prediction(tab, original, beam, len(ids) - 1)
        tab.page.click("[data-act=back]")
        tab.page.wait_for_selector("[data-act=back]", state="hidden")
        settle(tab)
        check_map(tab, "left", base.weights(1, 2))
        assert len(tab.texts(".chip span")) == 2
        tab.page.click("[data-act=generate]")
        tab.page.wait_for_function("() => document.querySelectorAll('.beam').length === 6")


def test_a_beam_is_left_again(live: Callable[[str], Tab], base: Record) -> None:
    tab = live("view=experiment&attention=1&head=2")
    assert not tab.page.is_visible("[data-act=back]")
    tab.page.click("[data-act=generate]")
    tab.page.wait_for_selector(".beam")
    assert tab.page.evaluate(
        "() => document.querySelector('.beam').getBoundingClientRect().top < "
        "document.querySelector('.prediction').getBoundingClientRect().bottom"
    )
    tab.page.click(".beam >> nth=0")
    tab.page.wait_for_selector("[data-act=back]")
    tab.page.click("[data-act=back]")
    tab.page.wait_for_selector("[data-act=back]", state="hidden")
    settle(tab)
    check_map(tab, "left", base.weights(1, 2))


def test_pairs_of_all_layers_are_those_of_the_shown_kind(browser: Any) -> None:
    torch.manual_seed(0)
    model = rg.models.Transformer(
        rg.models.TransformerConfig(vocabulary=14, d_model=24, layers=2, heads=3, d_hidden=32)
    )
    source, target = torch.randint(2, 14, (1, 6)), torch.randint(2, 14, (1, 5))

    def translated(text: str) -> Record:
        with torch.no_grad(), capture(model.eval()) as record:
            model(source, target)
        return record.decode(tokenizer())

    record = translated("")
    encoder = next(n for n, captured in enumerate(record.attentions) if captured.kind == "encoder")
    opened = Tab(browser)
    with served(Session(translated, "a text")) as address:
        opened.open(address, f"view=experiment&attention={encoder}&head=1")
        settle(opened)
        pick(opened, 5, 3, 6)  # a query that the decoder does not have
        opened.page.select_option("[data-scope=pairs]", "all")
        opened.page.click("[data-act=forbid]")
        opened.page.wait_for_selector(".chip")
        settle(opened)
        texts = record.streams["source"].tokens
        assert opened.texts(".chip span") == [f"forbid 5 {texts[5]} → 3 {texts[3]}, Encoder · all layers"]
        changed = record.ablate(Change(kind="encoder", forbid=[(5, 3)]))
        check_map(opened, "right", changed.weights(0, 1, kind="encoder"))
        opened.page.click(".controls [data-key=cross]")
        opened.page.wait_for_function("() => document.querySelector('[data-map=right] canvas').dataset.plot")
        settle(opened)
        weights = changed.weights(0, 1, kind="cross")
        cells = [[row, column] for row in range(5) for column in range(6)]
        actual = opened.page.evaluate(READ, ["right", cells, 5, 6])
        assert all(
            is_rounded(shown, weights[row, column].item())
            for (row, column), (shown,) in zip(cells, actual, strict=True)
        )
    assert opened.errors == []
    opened.context.close()


def read_why(tab: Tab, side: int = 0) -> dict[str, str]:
    tab.page.wait_for_selector(f".why-side[data-side='{side}']")
    lines = tab.page.eval_on_selector_all(
        f".why-side[data-side='{side}'] .why-line",
        "(all) => all.map((one) => [...one.children].map((part) => part.innerText))",
    )
    return {line[0]: line[1].lstrip("×÷+ ") for line in lines}


def check_why(tab: Tab, record: Record, query: int, key: int, side: int = 0) -> None:
    shown, steps = read_why(tab, side), record.explain_weight(1, 2, query, key)
    expected = {
        "Product": steps.product, "Scale": steps.scale, "Score": steps.score, "Temperature": steps.temperature,
        "Log-sum-exp": steps.lse, "Weight": record.weights(1, 2)[query, key].item(), "Value length": steps.value_length,
        "Contribution": steps.contribution, "Share of the output": steps.share,
    }  # fmt: skip
    if math.isfinite(steps.logit):
        expected["Logit"] = steps.logit
    for name, number in expected.items():
        assert is_rounded(shown[name], number), (name, shown[name], number)
    assert shown["Mask"] == ("visible" if steps.allowed else "hidden")
    terms = tab.page.eval_on_selector_all(
        f".why-side[data-side='{side}'] tr[data-dimension]",
        "(rows) => rows.map((row) => [...row.cells].slice(0, 4).map((cell) => cell.innerText))",
    )
    call = record.attention(1).calls[0]
    q, k = call.query[0, 2, query].double(), record.attention(1).key(call)[0, 2, key].double()
    assert [int(row[0]) for row in terms] == (q * k).abs().argsort(descending=True)[:8].tolist()
    for dimension, *values in terms:
        n = int(dimension)
        for text, number in zip(values, (q[n], k[n], q[n] * k[n]), strict=True):
            assert is_rounded(text, float(number))


def test_why_this_weight(live: Callable[[str], Tab], base: Record, shared: Tab, url: str) -> None:
    n = len(TEXT.split())
    shared.open(url, "view=map&attention=1&head=2")
    shared.page.wait_for_selector("canvas.plane")
    for query, key in ((7, 2), (3, 8)):  # the second is hidden by the mask
        pick(shared, query, key, n)
        shared.page.wait_for_function(
            "([q, k]) => document.querySelector('.why-pair')?.textContent.includes(`Query ${q} `) && "
            "document.querySelector('.why-pair').textContent.includes(`Key ${k} `)", arg=[query, key],
        )  # fmt: skip
        check_why(shared, base, query, key)
    shared.page.keyboard.press("Escape")
    shared.page.wait_for_selector(".why", state="hidden")
    tab = live(
        experiment({"temperature": [["1", 2]], "off": [["1", 2]], "forbid": [["decoder", -1, 7, 2]]}, cell="7-3")
    )
    changed = base.ablate(
        Change(layer=1, temperature=2.0), Change(layer=1, head=2, factor=0.0), Change(forbid=[(7, 2)])
    )
    check_why(tab, base, 7, 3, side=0)
    check_why(tab, changed, 7, 3, side=1)
    assert read_why(tab, 1)["Factor"] == "0"


def test_weights_scaled_by_the_lengths_of_values(
    live: Callable[[str], Tab], base: Record, shared: Tab, url: str
) -> None:
    captured = base.attention(1)
    lengths = captured.value(captured.calls[0])[0, 2].norm(dim=-1)
    expected = base.weights(1, 2) * lengths
    shared.open(url, "view=map&attention=1&head=2&scaled=1")
    shared.page.wait_for_function(
        "() => document.querySelector('.legend-label')?.textContent.startsWith('Weight × value')"
    )
    shared.wait_frames()
    check_map(shared, "left", expected)
    shared.page.click("[data-view=tokens]")
    shared.page.hover(".column-query .row >> nth=6")
    shared.page.wait_for_selector(".panel-key")
    rows = shared.page.eval_on_selector_all(
        ".panel-key .panel-row",
        "(rows) => rows.map((row) => [Number(row.children[1].innerText), row.children[3].innerText])",
    )
    assert rows
    assert all(is_rounded(shown, expected[6, key].item()) for key, shown in rows)
    tab = live(experiment({"off": [["0", 1]]}, scaled="1"))
    changed = base.ablate(Change(layer=0, head=1, factor=0.0))
    again = changed.attention(1)
    check_map(tab, "right", changed.weights(1, 2) * again.value(again.calls[0])[0, 2].norm(dim=-1))
    tab.page.click("[data-act=scaled]")
    settle(tab)
    check_map(tab, "right", changed.weights(1, 2))


def test_any_row_of_the_batch_and_both_languages(browser: Any) -> None:
    rows = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])

    def batch(text: str) -> Record:
        with torch.no_grad(), capture(MODEL) as record:
            MODEL(rows)
        return record.decode(tokenizer())

    opened = Tab(browser)
    with served(Session(batch, "two rows")) as address:
        opened.open(address, "view=map&attention=1&head=0")
        opened.page.select_option(".controls > .picker select", "1")
        opened.page.click("[data-view=tokens]")
        opened.page.wait_for_function("() => document.querySelector('.column-query .row-text').textContent === 'bird'")
        with torch.no_grad(), capture(MODEL) as alone:
            MODEL(rows[1:])
        opened.page.click("[data-view=experiment]")
        opened.page.wait_for_selector("[data-switch='0/0']")
        opened.page.click("[data-switch='0/0']")
        settle(opened)
        check_map(opened, "left", alone.weights(1, 0))
        check_map(opened, "right", alone.ablate(Change(layer=0, head=0, factor=0.0)).weights(1, 0))
        opened.page.click("[data-act=language]")
        settle(opened)
        assert opened.page.inner_text("[data-view=experiment]") == "实验"
        assert opened.texts("[data-map=right] h3") == ["改动后"]
    assert opened.errors == []
    opened.context.close()
