"""The viewer as a notebook widget: the front end of the page, with exact weights from the kernel."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ImportError(f"the notebook widget needs {error.name}: pip install 'regard[view]'") from error

from regard.view.captured_attention import Window
from regard.view.page import LANGUAGES, PageContent, bundle, finite, pack_array, static


class Records(Protocol):
    """The data source of the widget: a document, and windows of exact weights."""

    @property
    def document(self) -> PageContent: ...

    def window(
        self, attention: str, head: int, rows: tuple[int, int], columns: tuple[int, int], size: tuple[int, int]
    ) -> Window: ...


class Viewer(anywidget.AnyWidget):
    """Notebook widget of a record: `record.show()` or `record.show("zh")` as the last line of a cell."""

    _esm = bundle("widget")
    _css = static("style.css")
    _about = traitlets.Dict().tag(sync=True)
    _arrays = traitlets.Dict().tag(sync=True)
    _lang = traitlets.Unicode("en").tag(sync=True)
    _live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, record: Records, lang: str = "en") -> None:
        if lang not in LANGUAGES:
            raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}, but is {lang!r}")
        document = record.document
        arrays = {}
        for name, array in document.arrays.items():
            dtype, shape, data = pack_array(array)
            arrays[name] = {"dtype": dtype, "shape": shape, "data": data}
        super().__init__(_about=finite(document.about), _arrays=arrays, _lang=lang)
        self._record = record
        self.on_msg(self._answer)

    def _answer(self, _: Any, request: Any, __: Any) -> None:
        """Answer a message of the browser, {id, kind: "window", attention, head, rows, columns, size}."""
        if not isinstance(request, dict) or request.get("kind") != "window":
            return
        try:
            rows, columns, size = (tuple(request[name]) for name in ("rows", "columns", "size"))
            window = self._record.window(request["attention"], request["head"], rows=rows, columns=columns, size=size)
        except Exception as error:  # the browser waits for an answer to every request
            self.send({"id": request.get("id"), "error": f"{type(error).__name__}: {error}"})
            return
        answer = {"id": request["id"], "rows": window.rows.tolist(), "columns": window.columns.tolist()}
        self.send(answer, buffers=[np.ascontiguousarray(window.weights, "<f4").tobytes()])
