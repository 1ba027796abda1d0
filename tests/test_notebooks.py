"""The notebooks of examples/ run in a real kernel, and the viewer's widget answers there."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbformat")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient")
pytest.importorskip("ipykernel", reason="pip install ipykernel")

EXAMPLES = Path(__file__).parents[1] / "examples"


def opened(name: str, folder: Path) -> tuple[Any, Any]:
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    nbformat.validate(book)
    resources = {"metadata": {"path": str(folder)}}
    return book, nbclient.NotebookClient(book, timeout=240, kernel_name="python3", resources=resources)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    book = nbformat.read(path, 4)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", ["attention", "hugging_face"])
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    book, client = opened(name, tmp_path)
    client.execute()
    results = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in results)
    outputs = [output["data"]["text/plain"] for output in results if output.output_type == "execute_result"]
    assert "True" in outputs  # the comparisons in the notebook hold
    assert "False" not in outputs


def test_the_widget_answers_through_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a request as the browser does, by a message to the widget's comm, and check the reply."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    book, client = opened("view", tmp_path)
    book.cells.append(nbformat.v4.new_code_cell('record.window("0", 1, (0, 4), (0, 5)).weights.tolist()'))
    book.cells.append(nbformat.v4.new_code_cell("record"))
    with client.setup_kernel():
        for number, cell in enumerate(book.cells):
            client.execute_cell(cell, number)
        (shown,) = (
            output["data"]
            for cell in book.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        )
        comm = shown["application/vnd.jupyter.widget-view+json"]["model_id"]
        state = client.widget_state[comm]
        assert state["_anywidget_id"] == "regard.view.widget.Viewer"
        assert len(client.widget_buffers[comm]) == len(state["_arrays"])  # arrays are sent as bytes, not as text
        asked = {
            "id": 7,
            "kind": "window",
            "record": state["_about"]["record"],
            "attention": "0",
            "head": 1,
            "rows": [0, 4],
            "columns": [0, 5],
            "size": [4, 5],
        }
        content, buffers = answer(client, comm, asked)
        wrong, _ = answer(client, comm, asked | {"id": 8, "attention": "none"})
    assert content == {"id": 7, "rows": [[n, n + 1] for n in range(4)], "columns": [[n, n + 1] for n in range(5)]}
    expected = np.array(ast.literal_eval(book.cells[-2].outputs[0]["data"]["text/plain"]))
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4").reshape(4, 5), expected, rtol=1e-6)
    assert "<iframe srcdoc=" in book.cells[-1].outputs[0]["data"]["text/html"]  # a record shows itself as a page
    assert wrong["id"] == 8
    assert "none" in wrong["error"]


def answer(client: Any, comm: str, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the widget's reply to a message."""
    from jupyter_core.utils import run_sync

    kernel = client.kc
    request = {"comm_id": comm, "data": {"method": "custom", "content": content}}
    kernel.shell_channel.send(kernel.session.msg("comm_msg", request))
    until = time.monotonic() + 60
    while time.monotonic() < until:
        message = run_sync(kernel.iopub_channel.get_msg)(timeout=60)
        if message["header"]["msg_type"] == "comm_msg" and message["content"]["data"].get("method") == "custom":
            return message["content"]["data"]["content"], [bytes(part) for part in message["buffers"]]
    raise AssertionError("the widget did not answer")
