"""The notebook widget: messages of the kernel, and the front end."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import regard as rg
from regard.view import Change, capture
from regard.view.page import bundle, pack_array, static
from tests.view.browser import Tab
from tests.view.documents import Sample, long, pooled

pytest.importorskip("anywidget", reason="pip install 'regard[view]' brings anywidget")

from regard.view.widget import Viewer


@pytest.fixture(scope="module")
def document() -> Sample:
    return long(200, 1, 2, side=25, tops=4)


def record(document: Sample) -> Any:
    return SimpleNamespace(changes=(), document=document, window=document.window, text="")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    messages: list[tuple] = []
    monkeypatch.setattr(Viewer, "send", lambda self, content, buffers=None: messages.append((content, buffers)))
    return messages


def test_the_widget_contains_the_document(document: Sample) -> None:
    viewer = Viewer(record(document), lang="zh")
    assert viewer._about["title"] == "200 tokens"
    assert viewer._arrays["0-maps"]["shape"] == [2, 25, 25]
    assert viewer._lang == "zh"
    assert "export default" in str(viewer._esm)
    assert ".regard" in str(viewer._css)


def test_a_window_is_answered_with_its_weights(document: Sample, sent: list) -> None:
    viewer = Viewer(record(document))
    asked = {
        "record": viewer._about["record"],
        "id": 7,
        "kind": "window",
        "attention": "0",
        "head": 1,
        "rows": [10, 14],
        "columns": [0, 200],
        "size": [4, 50],
    }
    viewer._handle_custom_msg(asked, [])
    (content, buffers), *rest = sent
    assert content == {
        "id": 7, "rows": [[n, n + 1] for n in range(10, 14)], "columns": [[n, n + 4] for n in range(0, 200, 4)],
    }  # fmt: skip
    assert rest == []
    result = np.frombuffer(buffers[0], "<f4").reshape(4, 50)
    np.testing.assert_allclose(result, pooled(document.weights["0"][1:2, 10:14], (4, 50))[0], rtol=1e-5)


def test_a_failing_request_is_answered_with_an_error(document: Sample, sent: list) -> None:
    viewer = Viewer(record(document))
    viewer._handle_custom_msg({"id": 1, "kind": "window", "attention": "none"}, [])
    viewer._handle_custom_msg({"id": 2, "kind": "other"}, [])
    assert len(sent) == 1
    assert sent[0][0]["id"] == 1
    assert "expected {record, attention" in sent[0][0]["error"]


def test_experiments_are_answered_by_the_kernel(sent: list) -> None:
    torch.manual_seed(0)
    model = rg.models.LanguageModel(rg.models.LanguageConfig(30, d_model=16, layers=2, heads=2, d_hidden=16)).eval()
    with torch.no_grad(), capture(model) as record:
        model(torch.tensor([[4, 5, 6, 7]]))
    with torch.no_grad(), capture(model) as other:
        model(torch.tensor([[4, 9, 6, 7]]))
    viewer = record.show(against=other)
    assert viewer._about["against"]["record"] != viewer._about["record"]
    asked = {"record": viewer._about["record"], "changes": [{"attention": "0", "heads": [1], "factor": 0}]}
    viewer._handle_custom_msg({"id": 1, "kind": "experiment", **asked}, [])
    changed = sent[0][0]["answer"]["record"]
    part = {"attention": "1", "head": 0, "rows": [3, 4], "columns": [0, 4], "size": [1, 4]}
    viewer._handle_custom_msg({"id": 2, "kind": "window", "record": changed, **part}, [])
    expected = record.ablate(Change(layer=0, head=1, factor=0.0)).weights(1, 0, rows=[3])
    np.testing.assert_allclose(np.frombuffer(sent[1][1][0], "<f4"), expected[0], rtol=1e-6)
    viewer._handle_custom_msg({"id": 3, "kind": "experiment", **asked | {"changes": [{"factor": "x"}]}}, [])
    assert sent[2][0] == {"id": 3, "error": "factor must be a number, but is str"}


def test_an_unknown_language_is_refused(document: Sample) -> None:
    with pytest.raises(ValueError, match="lang must be one of"):
        Viewer(record(document), lang="fr")


HOST = """<!doctype html><meta charset="utf-8"><style>STYLE</style><div id="cell"></div><script type="module">
const state = STATE;
for (const array of Object.values(state._arrays)) {
  array.data = new DataView(Uint8Array.from(atob(array.data), (letter) => letter.charCodeAt(0)).buffer);
}
let answer = null;
const model = {
  get: (name) => state[name],
  on: (name, listener) => { if (name === "msg:custom") answer = listener },
  off: () => { answer = null },
  async send(asked) {
    const { data, ...message } = await window.kernel(JSON.stringify(asked));
    const bytes = Uint8Array.from(atob(data ?? ""), (letter) => letter.charCodeAt(0));
    answer({ ...message, id: asked.id }, data === undefined ? [] : [new DataView(bytes.buffer)]);
  },
};
const url = URL.createObjectURL(new Blob([ESM], { type: "text/javascript" }));
const widget = (await import(url)).default;
window.cleanup = await widget.render({ model, el: document.getElementById("cell") });
</script>"""


def hosted(document: Any, folder: Path, *, live: bool, style: str = "") -> str:
    """Return the URL of a page that hosts the widget like a notebook."""
    arrays = {}
    for name, array in document.arrays.items():
        dtype, shape, data = pack_array(array)
        arrays[name] = {"dtype": dtype, "shape": shape, "data": base64.b64encode(data).decode()}
    state = {"_about": document.about, "_arrays": arrays, "_lang": "en", "_live": live}
    text = HOST.replace("STYLE", static("style.css")).replace("STATE", json.dumps(state))
    text = text.replace('id="cell"', f'id="cell" style="{style}"')
    (folder / "cell.html").write_text(text.replace("ESM", json.dumps(bundle("widget"))), "utf-8")
    return (folder / "cell.html").as_uri()


def test_the_front_end_reads_single_weights_from_the_kernel(browser: Any, document: Sample, tmp_path: Path) -> None:
    path = hosted(document, tmp_path, live=True)
    asked = []

    def kernel(message: str) -> dict:
        question = json.loads(message)
        asked.append(question)
        window = document.window(
            question["attention"], question["head"], rows=question["rows"], columns=question["columns"],
            size=question["size"],
        )  # fmt: skip
        data = base64.b64encode(np.ascontiguousarray(window.weights, "<f4").tobytes()).decode()
        return {"data": data, "rows": window.rows.tolist(), "columns": window.columns.tolist()}

    opened = Tab(browser)
    opened.page.expose_function("kernel", kernel)
    opened.open(path)
    opened.page.click("[data-view=map]")
    opened.point(100, 50, 200, 200)
    for _ in range(12):
        opened.page.mouse.wheel(0, -250)
        opened.wait_frames()
    opened.page.wait_for_timeout(300)
    plot = opened.plot()
    opened.page.mouse.move(plot["x"] + plot["width"] / 2 + 3, plot["y"] + plot["height"] / 4)
    tip = opened.tip()
    query, key = (int(tip.split(word)[1].split()[0]) for word in ("Query ", "Key "))
    weight = document.weights["0"][0, query, key].item()
    assert abs(float(tip.split("Weight")[1].split()[0]) - weight) < 1e-4
    assert any(one["size"] == [one[axis][1] - one[axis][0] for axis in ("rows", "columns")] for one in asked)
    opened.page.click("[data-view=tokens]")
    opened.page.hover(".column-query .row >> nth=4")
    opened.page.wait_for_selector(".panel-key")
    best = opened.texts(".panel-key .panel-row .row-value")
    assert len(best) == 14  # more than the four top keys that the document holds
    assert abs(float(best[13]) - document.weights["0"][0, 4].sort(descending=True).values[13].item()) < 1e-4
    opened.page.evaluate("() => window.cleanup()")
    opened.context.close()
    assert opened.errors == []


def test_experiments_and_a_second_record_in_the_front_end(browser: Any, tmp_path: Path, sent: list) -> None:
    torch.manual_seed(0)
    model = rg.models.LanguageModel(rg.models.LanguageConfig(30, d_model=16, layers=2, heads=2, d_hidden=16)).eval()
    records = []
    for ids in ([4, 5, 6, 7], [4, 9, 6, 7]):
        with torch.no_grad(), capture(model) as each:
            model(torch.tensor([ids]))
        records.append(each)
    viewer = records[0].show(against=records[1])

    def kernel(message: str) -> dict:
        viewer._handle_custom_msg(json.loads(message), [])
        content, buffers = sent.pop()
        return content | ({"data": base64.b64encode(buffers[0]).decode()} if buffers else {})

    opened = Tab(browser)
    opened.page.expose_function("kernel", kernel)
    opened.open(hosted(SimpleNamespace(about=viewer._about, arrays=records[0].document.arrays), tmp_path, live=True))
    opened.page.click("[data-view=experiment]")
    changed = records[0].ablate(Change(layer=0, head=1, factor=0.0))
    for selector, other in (("[data-switch='0/1']", changed), ("[data-key=record]", records[1])):
        opened.page.click(selector)
        opened.page.wait_for_selector("[data-map=right] canvas.plane")
        opened.page.wait_for_function("() => document.querySelector('.view-experiment').dataset.busy === undefined")
        opened.wait_frames()
        shown = opened.page.evaluate(
            """() => { const canvas = document.querySelector("[data-map=right] canvas.plane");
            const [left, top, width, height] = canvas.dataset.plot.split(","), box = canvas.getBoundingClientRect();
            const [clientX, clientY] = [box.left + +left + 0.4 * width, box.top + +top + 0.9 * height];
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
            return document.querySelector(".tip-value").innerText }"""
        )
        assert float(shown) == pytest.approx(other.weights(0, 0)[3, 1].item(), rel=1e-3)
    opened.context.close()
    assert opened.errors == []


def test_the_tip_is_next_to_the_pointer_in_a_contained_cell(browser: Any, document: Sample, tmp_path: Path) -> None:
    path = hosted(document, tmp_path, live=False, style="margin: 90px 0 0 140px; contain: layout")
    opened = Tab(browser).open(path)
    opened.page.click("[data-view=tokens]")
    row = opened.page.locator(".column-query .row").nth(4)
    box = row.bounding_box()
    assert box
    opened.page.mouse.move(box["x"] + 20, box["y"] + 5)
    opened.tip()
    tip = opened.page.locator(".regard .tip").bounding_box()
    assert tip
    assert abs(tip["x"] - (box["x"] + 36)) < 2
    assert abs(tip["y"] - (box["y"] + 21)) < 2
    opened.context.close()
    assert opened.errors == []
