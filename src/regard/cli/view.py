"""`regard view` and `regard serve`: show the attention of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.cli.console import print_json, print_line, print_message
from regard.cli.inputs import with_context
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.files import check_writable
from regard.predictors import Predictor, open_model
from regard.predictors.checkpoint import as_user_errors


def view(name: str, text: str | None, out: Path, context: Path | None, lang: str, as_json: bool) -> None:
    """Write a page that shows the attention of a model over `text`."""
    _check_lang(lang)
    if text is None:
        raise UserError(f'give an input: regard view {name} "a text"; or --diagram for the architecture of the model')
    check_writable(out, suffixes=[".html"])
    record = make_capture(open_model(name))(with_context(Row("the text", (text,)), context).values[0])
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


def view_diagram(name: str, text: str | None, out: Path, context: Path | None, lang: str, as_json: bool) -> None:
    """Write the architecture of a model as an HTML page or an SVG file."""
    _check_lang(lang)
    if text is not None or context is not None:
        raise UserError("--diagram draws the architecture, which depends on no input; leave out the input")
    check_writable(out, suffixes=[".html", ".svg"])
    from regard.view.diagrams import save_diagram

    model = open_model(name).model
    save_diagram(model, out, name=Path(name).name, lang=lang)
    count = sum(each.numel() for each in model.parameters())
    if as_json:
        print_json({"diagram": str(out), "parameters": count})
    else:
        print_line(f"{out}: {type(model).__name__}, {count:,} parameters")


def serve(name: str, text: str | None, port: int, lang: str, against: str | None = None) -> None:
    """Serve the viewer at 127.0.0.1 until Ctrl-C; `against` is a second model to compare with."""
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
    predictor = open_model(name)
    if text is None and predictor.input_kind != "text":
        kind = predictor.input_kind
        raise UserError(f'give the path of an {kind} file: regard serve {name} "{kind}.file"')
    second = None if against is None else make_capture(open_model(against))
    session = Session(make_capture(predictor), text or predictor.viewer_text, against=second)
    serve_at(session, listener, lang=lang, report=print_message)


def make_capture(predictor: Predictor) -> Callable[[str], Any]:
    """Return a function that captures the attention of a model over an input."""
    from regard.view import capture_image, capture_text

    def capture_input(given: str) -> Any:
        if predictor.examines == "prediction":
            record = _capture_prediction(predictor, given)
        else:
            with as_user_errors(predictor.name):
                if predictor.examines == "text":
                    _check_length(predictor, given)
                    record = capture_text(predictor.model, predictor.tokenizer, given)
                else:
                    record = capture_image(predictor.model, given)
        record.title = f"{Path(predictor.name).resolve().name}, {predictor.kind}"
        return record

    return capture_input


def _check_length(predictor: Predictor, text: str) -> None:
    """Raise if a text has more tokens than the model takes."""
    if predictor.longest is not None and (size := len(predictor.tokenizer.encode(text).ids)) > predictor.longest:
        raise ValueError(f"the text has {size} tokens, but the model takes at most {predictor.longest}; shorten it")


def _capture_prediction(predictor: Predictor, given: str) -> Any:
    """Predict, and capture the last forward call."""
    from regard.view import capture

    bad = BadRows(skip=True)
    with capture(predictor.model) as record:
        place = "the text" if predictor.input_kind == "text" else given
        prediction = predictor.examine(Row(place, (given,)), bad)
    if prediction is None:
        raise UserError(bad.first[0] if bad.first else "the model made no prediction for this input")
    record.text = given
    record.note = prediction.output + ("" if prediction.score is None else f" (score {prediction.score:.2f})")
    predictor.name_tokens(record, prediction)
    return record


def _check_lang(lang: str) -> None:
    from regard.view.page import LANGUAGES

    if lang not in LANGUAGES:
        raise UserError(f"--lang must be {' or '.join(LANGUAGES)}, but is {lang!r}")
