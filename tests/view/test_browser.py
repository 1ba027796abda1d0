"""The viewer in a real browser: every view opens, and the numbers that it shows are the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.view.browser import Tab
from tests.view.documents import MARKUP, Sample, pooled

Open = Callable[..., Tab]
# Texts in the saved picture of each view: names of heads, legends, and the chosen token.
SAVED = {
    "heads": ["Layer 2, head 3", "Induction", "largest weight of each head"],
    "map": ["Weight"],
    "tokens": ["Queries: source", "Keys: source", "Weight", "0.5"],
    "rollout": ["Share"],
    "statistics": ["Entropy", "Layer", "Head 3"],
    "image": ["Patch 0, 1 · Attends to", "Weight"],
    "sound": ["0.08 to 0.12 s · Attends to", "2.40 s"],
}


def near(text: str, weight: float) -> bool:
    numbers = [float(number) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", text)]
    return any(abs(number - weight) <= 2e-3 * weight + 6e-5 for number in numbers)


@pytest.mark.parametrize("document", ["translation", "picture", "sound", "long"])
def test_every_view_opens_from_its_tab(tab: Open, document: str) -> None:
    opened = tab(document)
    views = [each.get_attribute("data-view") for each in opened.page.locator("[role=tab]").all()]
    assert len(views) >= 4
    for view in views:
        opened.page.click(f"[role=tab][data-view={view}]")
        opened.wait_frames()
        assert opened.page.get_attribute(f"[data-view={view}]", "aria-selected") == "true"
        assert opened.page.locator(".regard main > .view").count() == 1
        assert opened.page.locator(".regard .toast:not([hidden])").count() == 0


def test_views_without_data_have_no_tab(tab: Open) -> None:
    views = [each.get_attribute("data-view") for each in tab("translation").page.locator("[role=tab]").all()]
    assert views == ["heads", "map", "tokens", "rollout", "statistics"]


def test_all_heads_of_the_chosen_kind_are_drawn(tab: Open) -> None:
    opened = tab("translation")
    assert opened.page.locator(".thumb").count() == 12
    drawn = "() => [...document.querySelectorAll('.thumb canvas')].every((one) => one.width === 18)"
    opened.page.wait_for_function(drawn)
    opened.page.click("[role=radio][data-key=cross]")
    assert opened.page.locator(".thumb").count() == 8


def test_equal_weights_have_one_colour(tab: Open) -> None:
    opened = tab("even")  # 151 keys: 50 thumbnail cells of three, and one of one
    opened.page.wait_for_selector(".thumb canvas[width='51']")
    colours = opened.page.evaluate(
        """() => { const one = document.querySelector('.thumb canvas');
        const data = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
        return [...new Set(new Uint32Array(data.buffer))] }"""
    )
    assert len(colours) == 1


def test_a_role_or_layer_that_another_kind_does_not_have_hides_none_of_its_heads(tab: Open) -> None:
    opened = tab("translation", "named=induction&only=1")
    assert len(opened.texts(".thumb")) == 1
    opened.page.click("[data-key=cross]")
    opened.page.wait_for_function("() => document.querySelector('.count').textContent === '4 of 8 heads'")
    opened.page.click("[data-key=encoder]")
    opened.page.select_option(".controls select >> nth=4", "2")
    opened.page.click("[data-key=cross]")
    opened.page.wait_for_function("() => document.querySelector('.count').textContent === '8 of 8 heads'")


def test_the_legend_fits_into_a_narrow_window(browser: Any, addresses: dict[str, str]) -> None:
    opened = Tab(browser)
    opened.page.set_viewport_size({"width": 420, "height": 800})
    opened.open(addresses["translation"], "view=map")
    opened.plot()
    right = opened.page.eval_on_selector(".legend", "(one) => one.getBoundingClientRect().right")
    opened.context.close()
    assert right <= 420


def test_a_cell_of_the_map_shows_its_weight(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=map&attention=2&head=3")
    weights = samples["translation"].weights["2"][3]
    for row, column in [(0, 0), (3, 7), (17, 4)]:
        opened.point(row, column, *weights.shape)
        assert near(opened.tip().split("Weight")[1], weights[row, column].item())
        assert f"Query {row}" in opened.tip()
        assert f"Key {column}" in opened.tip()


def test_a_cell_of_a_pooled_map_shows_its_mean_and_the_weight_of_a_top_key(
    tab: Open, samples: dict[str, Sample]
) -> None:
    opened = tab("long", "view=map&attention=1&head=2")
    weights = samples["long"].weights["1"]
    means = pooled(weights, (32, 32))[2]
    opened.point(5, 9, 32, 32)
    assert "Queries 40–47" in opened.tip()
    assert "Keys 72–79" in opened.tip()
    assert near(opened.tip().split("Pooled weight")[1], means[5, 9].item())
    assert "mean of 8 x 8 weights" in opened.tip()
    query = 44
    key = weights[2, query].argmax().item()
    opened.point(query, key, 256, 256)
    opened.page.wait_for_function(f"() => document.querySelector('.tip').textContent.includes('{query} → {key}')")
    assert near(opened.tip().split("→")[1], weights[2, query, key].item())


def test_the_wheel_zooms_to_single_weights_under_the_pointer(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=map")
    weights = samples["translation"].weights["0"][0]
    opened.point(6, 6, *weights.shape)
    for _ in range(6):
        opened.page.mouse.wheel(0, -200)
        opened.wait_frames()
    assert "Query 6" in opened.tip()
    assert near(opened.tip().split("Weight")[1], weights[6, 6].item())
    opened.page.wait_for_function("() => location.hash.includes('rows=')")


def test_dragging_moves_the_map(tab: Open) -> None:
    opened = tab("translation", "view=map&rows=4-8&columns=4-8")
    opened.point(2, 2, 4, 4)
    plot = opened.plot()
    opened.page.mouse.down()
    opened.page.mouse.move(plot["x"] + 2.5 * plot["width"] / 4, plot["y"] + 3.5 * plot["height"] / 4, steps=3)
    opened.page.mouse.up()
    opened.page.wait_for_function("() => location.hash.includes('rows=3-7') && location.hash.includes('columns=4-8')")


def test_a_token_shows_its_keys_and_queries(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=tokens&attention=1&head=1")
    weights = samples["translation"].weights["1"][1]
    opened.page.hover(".column-query .row >> nth=3")
    opened.page.wait_for_selector(".panel-key")
    looks = opened.texts(".panel-key .panel-row")
    best = weights[3].argmax().item()
    assert looks[0].startswith(str(best))
    assert near(looks[0][len(str(best)) :], weights[3, best].item())
    query = weights[:, 3].argmax().item()
    panel_row = opened.texts(".panel-query .panel-row")[0]
    assert panel_row.startswith(str(query))
    assert near(panel_row[len(str(query)) :], weights[query, 3].item())
    values = opened.texts(".column-key .row:not([hidden]) .row-value")
    for text, weight in zip(values, weights[3].tolist(), strict=True):
        assert near(text, weight)
    assert opened.page.locator(".line-looks").count() == 18
    opened.page.hover(".column-key .row >> nth=5")
    opened.page.wait_for_selector(".line-looked")
    assert near(opened.tip(), weights[:, 5].max().item())


def test_cross_attention_joins_two_streams(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=tokens&kind=cross")
    weights = samples["translation"].weights["4"][0]
    assert opened.page.locator(".column-query .row:not([hidden])").count() == 10
    assert opened.page.locator(".column-key .row:not([hidden])").count() == 18
    opened.page.hover(".column-query .row >> nth=4")
    opened.page.wait_for_selector(".panel-key")
    assert opened.page.locator(".panel-query").count() == 0
    assert near(opened.texts(".panel-key .panel-row")[0], weights[4].max().item())


def test_long_documents_use_top_keys_and_few_elements(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("long", "view=tokens&head=1")
    weights = samples["long"].weights["0"][1]
    assert opened.page.locator(".column .row").count() < 120
    opened.page.evaluate("() => { document.querySelector('.scroller').scrollTop = 24 * 200 }")
    opened.wait_frames()
    opened.page.hover(".column-query .row >> nth=2")
    opened.page.wait_for_selector(".panel-key")
    token = int(opened.page.inner_text(".panel header .row-number"))
    assert token == 202
    assert near(opened.texts(".panel-key .panel-row .row-value")[0], weights[token].max().item())
    assert len(opened.texts(".panel-key .panel-row")) == 4
    assert "top keys only" in opened.page.inner_text(".panel")


def test_patches_show_their_weights_over_the_image(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("picture", "view=image&attention=1&head=2")
    weights = samples["picture"].weights["1"][2]
    box = opened.page.locator(".picture").bounding_box()
    patch = 1 + 2 * 8 + 3
    opened.page.mouse.move(box["x"] + 3.5 * box["width"] / 8, box["y"] + 2.5 * box["height"] / 6)
    opened.page.wait_for_function("() => document.querySelector('.tip').textContent.includes('Patch 2, 3')")
    assert near(opened.tip().split("Attends to")[1], weights[patch].max().item())
    opened.page.mouse.down()
    opened.page.mouse.up()  # pinned: now hovering shows values
    opened.page.mouse.move(box["x"] + 5.5 * box["width"] / 8, box["y"] + 4.5 * box["height"] / 6)
    opened.page.wait_for_function("() => document.querySelector('.tip').textContent.includes('Patch 4, 5')")
    assert near(opened.tip().split("Weight")[1], weights[patch, 1 + 4 * 8 + 5].item())
    pixels = opened.page.evaluate(
        "() => [...document.querySelector('.heat').getContext('2d').getImageData(0, 0, 8, 6).data]"
    )
    light = [sum(pixels[n : n + 3]) for n in range(0, len(pixels), 4)]
    assert light[weights[patch, 1:].argmax().item()] == max(light)
    assert light[weights[patch, 1:].argmin().item()] == min(light) < max(light)
    opened.page.locator(".opacity").fill("0")
    assert opened.page.evaluate("() => document.querySelector('.heat').style.opacity") == "0"  # the image itself


def test_words_show_their_weights_over_time(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("sound", "view=sound&kind=cross")
    weights = samples["sound"].weights["1"][0]
    opened.page.hover(".list .row >> nth=2")
    opened.page.wait_for_function("() => document.querySelector('.readout').textContent.includes('two')")
    assert near(opened.page.inner_text(".peak"), weights[2].max().item())
    slot = weights[2].argmax().item()
    assert f"{2.4 * slot / 60:.2f} to" in opened.page.inner_text(".readout")
    opened.page.click("[data-key=encoder]")
    box = opened.page.locator(".sound-picture").bounding_box()
    opened.page.mouse.move(box["x"] + 20.5 * box["width"] / 60, box["y"] + 50)
    opened.page.wait_for_function("() => document.querySelector('.tip').textContent.includes('0.80 to 0.84')")
    assert near(opened.tip().split("Attends to")[1][-7:], samples["sound"].weights["0"][0][20].max().item())


def test_rollout_is_read_layer_by_layer(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=rollout")
    layers = samples["translation"].weights["rollout"]
    opened.point(2, 9, 18, 18)
    assert near(opened.tip().split("Share")[1], float(layers[-1][2, 9]))
    opened.page.locator(".slider").focus()
    opened.page.keyboard.press("Home")
    opened.page.wait_for_function(
        "() => document.querySelector('.slider-label').textContent === 'Encoder self-attention: Up to layer 0'"
    )
    opened.point(3, 9, 18, 18)
    opened.point(2, 9, 18, 18)
    assert near(opened.tip().split("Share")[1], float(layers[0][2, 9]))


def test_statistics_are_the_means_of_the_document(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation", "view=statistics")
    about = samples["translation"].about["attentions"]
    for name in ("entropy", "distance", "max_logit", "sink"):
        opened.page.click(f"[role=radio][data-key={name}]")
        for number in range(3):
            for head in range(4):
                label = opened.page.get_attribute(f".matrix [data-head='{number}/{head}']", "aria-label")
                assert near(label.split(":")[1], about[number]["means"][name][head])
    assert opened.texts(".roles tbody tr") == ["Previous token110.97", "Induction120.61"]
    opened.page.click(".roles .link >> nth=1")
    opened.page.wait_for_selector("canvas.plane")
    opened.page.wait_for_function("() => location.hash.includes('head=2') && location.hash.includes('attention=1')")


def test_statistics_say_that_cross_attention_has_no_distance(tab: Open) -> None:
    opened = tab("translation", "view=statistics&kind=cross&statistic=distance")
    assert opened.page.inner_text(".statistics-main > p").startswith("Cross-attention has no distance")
    assert not opened.page.is_visible(".chart")
    opened.page.click("[role=radio][data-key=entropy]")
    assert opened.page.inner_text(".statistics-main > p").startswith("Entropy of the weights")
    assert opened.page.is_visible(".chart")


def test_heads_are_sorted_and_filtered(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation")
    about = samples["translation"].about["attentions"]
    opened.page.select_option(".controls select >> nth=2", "entropy")
    order = [each.get_attribute("data-head") for each in opened.page.locator(".thumb").all()]
    means = {f"{n}/{head}": about[n]["means"]["entropy"][head] for n in range(3) for head in range(4)}
    assert order == sorted(means, key=lambda head: -means[head])
    opened.page.click("[data-act=order]")
    assert [each.get_attribute("data-head") for each in opened.page.locator(".thumb").all()] == order[::-1]
    opened.page.select_option(".controls select >> nth=3", "induction")
    assert [each.get_attribute("data-head") for each in opened.page.locator(".thumb").all()] == ["1/2"]
    opened.page.select_option(".controls select >> nth=3", "")
    opened.page.select_option(".controls select >> nth=4", "2")
    assert opened.page.locator(".thumb").count() == 4


def test_tokens_can_be_searched(tab: Open) -> None:
    opened = tab("translation", "view=tokens")
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("at")
    assert opened.texts(".column-query .row.found .row-text") == [" cat", " sat", " mat"]
    assert "1 of 3" in opened.page.inner_text(".search-group")
    opened.page.keyboard.press("Enter")
    assert "2 of 3" in opened.page.inner_text(".search-group")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator(".row.found").count() == 0


def test_markup_in_tokens_is_text(tab: Open) -> None:
    opened = tab("translation", "view=tokens")
    shown_texts = opened.texts(".column-query .row-text")
    assert set(MARKUP) <= set(shown_texts)
    assert "⟨U+202E⟩abc" in shown_texts
    assert "⟨U+200F⟩" in shown_texts
    for view in ("map", "heads", "statistics", "rollout"):
        opened.page.click(f"[data-view={view}]")
        opened.wait_frames()
    assert opened.page.evaluate("() => document.querySelectorAll('.regard img, .regard script').length") == 0
    assert opened.page.inner_text("h1") == "The small cat <b>sat</b>"


def test_the_policy_stops_other_scripts_and_markup(browser: object, addresses: dict[str, str]) -> None:
    opened = Tab(browser).open(addresses["translation"])
    stopped = opened.page.evaluate(
        """async () => { const stopped = [];
        await new Promise((done) => setTimeout(() => {
          try { document.body.innerHTML = "<b>x</b>" } catch { stopped.push("markup") }
          try { eval("1") } catch { stopped.push("eval") }
          done();
        }));
        const script = document.createElement("script");
        try { script.textContent = "window.ran = true"; document.body.append(script) } catch {}
        if (window.ran === undefined) stopped.push("script");
        return stopped }"""
    )
    assert stopped == ["markup", "eval", "script"]
    opened.context.close()  # its console errors are expected


def test_the_keyboard_does_everything(tab: Open, samples: dict[str, Sample]) -> None:
    opened = tab("translation")
    press = opened.page.keyboard.press
    press("1")
    press("ArrowRight")
    press("ArrowDown")
    press("Enter")
    opened.page.wait_for_function("() => location.hash.includes('view=map&attention=1&head=1')")
    press("2")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        press(key)
    opened.wait_frames()
    assert "Query 1" in opened.page.inner_text(".readout")
    assert near(
        opened.page.inner_text(".readout").split("Weight")[1], samples["translation"].weights["1"][1][1, 3].item()
    )
    press("+")
    opened.page.wait_for_function("() => location.hash.includes('rows=')")
    press("0")
    opened.page.wait_for_function("() => !location.hash.includes('rows=')")
    press("]")
    press(".")
    opened.page.wait_for_function("() => location.hash.includes('attention=2&head=2')")
    press("k")
    opened.page.wait_for_function("() => location.hash.includes('attention=3')")
    press("3")
    press("ArrowDown")
    press("ArrowDown")
    opened.page.wait_for_function("() => location.hash.includes('token=1')")
    assert opened.page.locator(".row[aria-selected=true]").count() == 1
    press("Escape")
    opened.page.wait_for_function("() => !location.hash.includes('token=')")
    press("?")
    assert opened.page.locator("dialog.help kbd").count() > 15
    press("Escape")
    assert not opened.page.locator("dialog.help").is_visible()


def test_focus_is_visible_and_controls_have_names(tab: Open) -> None:
    opened = tab("translation")
    opened.page.keyboard.press("Tab")
    outline = opened.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    for view in ("heads", "map", "tokens", "rollout", "statistics"):
        opened.page.click(f"[data-view={view}]")
        opened.wait_frames()
        nameless = opened.page.evaluate(
            """() => [...document.querySelectorAll(".regard :is(button, select, input, [tabindex='0'])")]
            .filter((one) => one.offsetParent && !(one.ariaLabel || one.textContent.trim() || one.closest("label")))
            .map((one) => one.outerHTML.slice(0, 80))"""
        )
        assert nameless == []


def test_the_link_restores_the_view(tab: Open) -> None:
    opened = tab("translation", "view=map&attention=1&head=2")
    opened.point(9, 9, 18, 18)
    opened.page.mouse.wheel(0, -300)
    opened.page.fill(".search", "cat")
    opened.page.wait_for_function("() => location.hash.includes('search=cat') && location.hash.includes('rows=')")
    address = opened.page.evaluate("() => location.hash.slice(1)")
    again = tab("translation", address)
    again.wait_frames()
    assert again.page.input_value(".search") == "cat"
    again.page.wait_for_timeout(300)
    assert again.page.evaluate("() => location.hash.slice(1)") == address
    assert "view=map&attention=1&head=2" in address


@pytest.mark.parametrize(
    "address", ["view=nowhere&head=99&attention=77", "rows=9-2&token=-1", "%%%=&__proto__=1", "token=999999"]
)
def test_an_invalid_address_opens_the_default_view(tab: Open, address: str) -> None:
    assert tab("translation", address).page.locator(".thumb").count() == 12


def test_dark_mode_follows_the_system_and_the_button(tab: Open) -> None:
    opened = tab("translation", color_scheme="dark")
    theme = """() => { const root = document.querySelector(".regard");
    return [root.dataset.theme, getComputedStyle(root).backgroundColor] }"""
    assert opened.page.evaluate(theme) == ["dark", "rgb(15, 17, 24)"]
    opened.page.click("[data-act=theme]")
    assert opened.page.evaluate(theme) == ["light", "rgb(246, 247, 250)"]
    opened.page.keyboard.press("t")
    assert opened.page.evaluate(theme)[0] == "dark"


def test_the_interface_can_be_chinese(tab: Open) -> None:
    opened = tab("translation")
    opened.page.click("[data-act=language]")
    assert opened.texts("[role=tab]") == ["注意力头", "权重图", "词元", "逐层累积", "统计"]
    assert opened.page.get_attribute("html", "lang") == "zh-CN"
    for view in ("map", "tokens", "rollout", "statistics"):
        opened.page.click(f"[data-view={view}]")
        opened.wait_frames()
        latin = re.findall(r"[A-Za-z]{4,}", opened.page.inner_text(".controls") + opened.page.inner_text(".foot"))
        assert set(latin) <= {"Attention", "logit"}


@pytest.mark.parametrize("document", ["translation", "picture", "sound"])
def test_every_view_is_saved_as_png_and_svg(
    tab: Open, samples: dict[str, Sample], document: str, tmp_path: Path
) -> None:
    views = {"picture": ["image"], "sound": ["sound"]}
    opened = tab(document, "token=2")
    for view in views.get(document, ["heads", "map", "tokens", "rollout", "statistics"]):
        opened.page.click(f"[data-view={view}]")
        opened.wait_frames()
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<svg")):
            with opened.page.expect_download() as download:
                opened.page.click(f"[data-act={kind}]")
            path = tmp_path / download.value.suggested_filename
            download.value.save_as(path)
            name = {"map": "map-encoder-0-0", "tokens": "tokens-encoder-0-0", "image": "image-encoder-0-0",
                    "sound": "sound-encoder-0-0", "statistics": "statistics-encoder-entropy"}.get(
                        view, f"{view}-encoder")  # fmt: skip
            assert path.name == f"regard-{name}.{kind}"
            saved = path.read_bytes()
            assert saved.startswith(start)
            assert len(saved) > 4000 if kind == "png" else len(list(ElementTree.fromstring(saved).iter())) > 3
            if kind == "svg":
                text = saved.decode()
                assert "Encoder self-attention" in text
                whole = ElementTree.fromstring(saved)
                title = next(node.text for node in whole.iter() if node.get("font-size") == "14")
                assert float(whole.get("width")) > 7 * len(title)  # none of it is cut off
                assert ("colour-bar" in text) == (view not in ("tokens", "sound"))
                for word in SAVED[view]:
                    assert f">{word}<" in text, word
                if view == "image":
                    assert text.count(samples["picture"].about["image"]["href"]) == 2  # as it is, and below the weights


def test_only_visible_arrays_are_decoded(tab: Open) -> None:
    opened = tab("long", color_scheme="light")
    opened.page.add_init_script(
        """window.decoded = 0; const plain = DecompressionStream;
        window.DecompressionStream = class extends plain { constructor(kind) { super(kind); window.decoded++ } }"""
    )
    opened.open(opened.url, "view=tokens")
    opened.page.wait_for_selector(".line-faint")
    assert opened.page.evaluate("() => window.decoded") == 2  # top keys and their weights, of one layer
    opened.page.click("[data-view=heads]")
    opened.page.wait_for_selector(".thumb canvas[width='32']")
    assert opened.page.evaluate("() => window.decoded") == 4  # and the maps of two


def test_statistics_that_are_sorted_are_saved_by_layer(tab: Open, samples: dict[str, Sample], tmp_path: Path) -> None:
    opened = tab("translation", "view=statistics&kind=encoder&sort=entropy&down=1")
    with opened.page.expect_download() as download:
        opened.page.click("[data-act=svg]")
    download.value.save_as(tmp_path / "out.svg")
    texts = [
        (float(node.get("y")), float(node.get("x")), node.text)
        for node in ElementTree.parse(tmp_path / "out.svg").iter("{http://www.w3.org/2000/svg}text")
        if node.get("font-size") in ("11", "8") and node.get("y") and float(node.get("y")) > 40
    ]
    rows = {y: text for y, x, text in texts if x == 38}
    about = samples["translation"].about["attentions"]
    assert len(rows) == 3
    for y, layer in rows.items():
        means = about[int(layer)]["means"]["entropy"]
        values = [text for top, x, text in sorted(texts) if top == y and x != 38]
        heads = [int(text.split()[-1]) for top, x, text in sorted(texts) if top == y + 19]
        assert values == [f"{means[head]:.2f}" for head in heads]
        assert [means[head] for head in heads] == sorted(means, reverse=True)


def test_ticks_are_round_numbers_at_their_positions(tab: Open) -> None:
    opened = tab("translation", "view=statistics&kind=decoder")
    opened.page.wait_for_selector(".chart .tick")
    ticks = opened.page.evaluate(
        """() => [...document.querySelectorAll(".chart .tick")].map((tick) =>
        [Number(tick.getAttribute("x")), Number(tick.getAttribute("y")), tick.textContent])"""
    )
    across = [(x, text) for x, y, text in ticks if y == 142]
    assert [text for _, text in across] == ["0", "2", "4", "6", "8"]  # of ten queries
    for x, text in across:
        assert x == pytest.approx(44 + 586 * int(text) / 9)
    down = [(y, float(text)) for _, y, text in ticks if y != 142]
    steps = {round((b[0] - a[0]) / (b[1] - a[1]), 6) for a, b in pairwise(down)}
    assert len(steps) == 1
