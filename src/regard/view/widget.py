"""The viewer as a notebook widget: the front end of the page, with exact weights from the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ImportError(f"the notebook widget needs {error.name}: pip install 'regard[view]'") from error

from regard.view.page import LANGUAGES, PageContent, bundle, finite, pack_array, stylesheet
from regard.view.workspace import REQUESTS, Workspace

if TYPE_CHECKING:
    from regard.view.record import Record


class Viewer(anywidget.AnyWidget):
    """Notebook widget of a record: `record.show()` or `record.show("zh")` as the last line of a cell."""

    _esm = bundle("widget")
    _css = stylesheet(live=True)
    _about = traitlets.Dict().tag(sync=True)
    _arrays = traitlets.Dict().tag(sync=True)
    _lang = traitlets.Unicode("en").tag(sync=True)
    _live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, record: Record, lang: str = "en", against: Record | None = None) -> None:
        if lang not in LANGUAGES:
            raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}, but is {lang!r}")
        document: PageContent = record.document
        self._workspace = Workspace()
        about = document.about | {"record": self._workspace.add(record, record.text).id}
        if against is not None:
            about |= {"compares": ["record"], "against": self._workspace.add(against, against.text).summary()}
        arrays = {}
        for name, array in document.arrays.items():
            dtype, shape, data = pack_array(array)
            arrays[name] = {"dtype": dtype, "shape": shape, "data": data}
        super().__init__(_about=finite(about), _arrays=arrays, _lang=lang)
        self.on_msg(self._answer)

    def _answer(self, _: Any, request: Any, __: Any) -> None:
        """Answer a message of the browser, {id, kind, ...}: a window or one of `workspace.REQUESTS`."""
        if not isinstance(request, dict) or request.get("kind") not in ("window", *REQUESTS):
            return
        name, kind = request.get("id"), request["kind"]
        try:
            if kind != "window":
                self.send({"id": name, "answer": finite(self._workspace.answer(kind, request))})
                return
            window = self._workspace.window(request)
        except Exception as error:  # the browser waits for an answer to every request
            self.send({"id": name, "error": f"{error}" or type(error).__name__})
            return
        answer = {"id": name, "rows": window.rows.tolist(), "columns": window.columns.tolist()}
        self.send(answer, buffers=[np.ascontiguousarray(window.weights, "<f4").tobytes()])
