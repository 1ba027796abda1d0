"""`regard view` and `regard serve`: show the attention of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.cli.console import print_json, print_line, print_message
from regard.cli.inputs import with_context
from regard.data.readers import Row
from regard.errors import BadRows
from regard.files import check_writable
from regard.tasks import Run, Task, UserError


def view(folder: Path, text: str, out: Path, context: Path | None, lang: str, as_json: bool) -> None:
    """Write a page that shows the attention of a model over `text`."""
    _check_lang(lang)
    check_writable(out)
    record = make_capture(folder)(with_context(Row("the text", (text,)), context).values[0])
    record.save(out, lang)
    if as_json:
        about = {
            "page": str(out),
            "note": record.note,
            "attentions": [repr(attention) for attention in record.attentions],
        }
        print_json(about)
    else:
        print_line(f"{out}: {len(record)} attentions, {out.stat().st_size / 1e6:.1f} MB")


def serve(folder: Path, text: str | None, port: int, lang: str) -> None:
    """Serve the viewer at 127.0.0.1 until Ctrl-C."""
    _check_lang(lang)
    try:
        from regard.view.server import Session, listen
        from regard.view.server import serve as serve_at
    except ImportError as error:
        raise UserError(f"regard serve needs {error.name}: pip install 'regard[view]'") from error
    try:
        listener = listen(port)
    except OSError as error:
        raise UserError(f"port {port} at 127.0.0.1: {error.strerror}; choose another with --port") from error
    capture = make_capture(folder)
    if text is None and isinstance(capture, RunCapture) and capture.run.task.input_kind != "text":
        kind = capture.run.task.input_kind
        raise UserError(f'give the path of an {kind} file: regard serve {folder} "{kind}.file"')
    first = text or (capture.run.task.viewer_text if isinstance(capture, RunCapture) else Task.viewer_text)
    serve_at(Session(capture, first), listener, lang=lang, report=print_message)


class RunCapture:
    """Predict as `regard predict` does and capture the attention of the last forward call."""

    def __init__(self, folder: Path) -> None:
        self.run = Run.open(folder)
        self.model, _ = self.run.model(frozen=True)

    def __call__(self, text: str) -> Any:
        from regard.view import capture

        bad = BadRows(skip=True)
        with capture(self.model) as record:
            predictions = list(self.run.task.predict(self.model, self.run.processor, [Row("the text", (text,))], bad))
        if not predictions:
            raise UserError(bad.first[0] if bad.first else "the model made no prediction for this input")
        record.title = f"{self.run.task.name}, {self.run.folder.resolve().name}"
        record.text = text
        record.note = f"{predictions[0].output} ({predictions[0].score:.2f})"
        self.run.task.name_tokens(self.model, self.run.processor, record, predictions[0])
        return record


def make_capture(folder: Path) -> Callable[[str], Any]:
    """Return a function that captures the attention of a model over a text.

    The model is that of a run, or of a checkpoint folder with its tokenizer.
    """
    if (folder / "run.json").exists() or not (folder / "config.json").exists():
        return RunCapture(folder)
    from regard.models import load, tokenizer
    from regard.view import capture_image, capture_text

    try:
        model = load(folder, frozen=True)
        read = None if hasattr(getattr(model, "config", None), "grid") else tokenizer(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: {error}") from error

    def capture_given(given: str) -> Any:
        try:
            return capture_image(model, given) if read is None else capture_text(model, read, given)
        except (OSError, ValueError) as error:
            raise UserError(f"{error}") from error

    return capture_given


def _check_lang(lang: str) -> None:
    from regard.view.page import LANGUAGES

    if lang not in LANGUAGES:
        raise UserError(f"--lang must be {' or '.join(LANGUAGES)}, but is {lang!r}")
