"""The inputs of `regard predict`: texts, files or standard input; one row per input."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.data.images import SUFFIXES as IMAGES
from regard.data.readers import (
    FORMATS,
    OPENERS,
    TABS,
    TEXT,
    Row,
    decode_line,
    file_format,
    read_lines,
    read_text,
    split_cells,
    with_placeholders,
)
from regard.errors import BadRows, UserError
from regard.predictors import Predictor
from regard.training.task import Prediction

STREAM = "standard input"
SOUNDS = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".m4a")
FILES = (*FORMATS, *TABS, *OPENERS, *IMAGES, *SOUNDS, ".json")


def read_inputs(predictor: Predictor, inputs: list[str], bad: BadRows, form: str = "") -> Iterator[Row]:
    """Yield the inputs: arguments, rows of files, or lines of standard input.

    A row without values is an input without an output: a blank line, or a bad row.
    form: format of standard input: "csv", "tsv", "jsonl", or "txt" for one text per line. If it is empty, one text per
        line is assumed, and input that looks like a table is an error.
    """
    if form and (inputs or form not in ("txt", "csv", "tsv", "jsonl")):
        raise UserError(f"--format must be txt, csv, tsv or jsonl, and applies to standard input only, but is {form!r}")
    if not inputs and not sys.stdin.isatty():
        yield from _read_stdin(predictor, form, bad)
    for n, given in enumerate(inputs, 1):
        if not given.strip():
            raise UserError(f"input {n} is empty; give a text or a file")
        if not _exists(given):
            if predictor.input_kind == "text" and looks_like_path(given):
                raise UserError(f"{given}: no such file; if it is a text, pass it on standard input")
            yield Row(given if predictor.input_kind != "text" else f"input {n}", (given,))
            continue
        path, suffix = Path(given), file_format(Path(given))
        if predictor.input_kind == "text" and path.is_file() and suffix in TEXT:
            yield from with_placeholders(_texts(predictor, read_lines(path, bad), bad, table_hint="name it ."), bad)
        elif predictor.input_kind == "text" or path.is_dir() or suffix in (*FORMATS, ".json") or "idx3" in path.name:
            yield from with_placeholders(predictor.read_inputs(given, bad), bad)
        else:
            yield Row(given, (given,))


def looks_like_path(text: str) -> bool:
    """Whether an argument is meant as a path: it has a known file suffix, or is one word with a slash.

    >>> from regard.cli.inputs import looks_like_path
    >>> [looks_like_path(text) for text in ("my reviews.csv", "data/reviews", "./all of them", "Cats and/or dogs.")]
    [True, True, True, False]
    """
    if text.startswith(("/", "./", "../", "~")):
        return "\n" not in text and "\t" not in text
    return text.lower().endswith(FILES) or ("/" in text and len(text.split()) == 1)


def with_context(row: Row, context: Path | None) -> Row:
    """Append a tab and the text of the file `context`, if it is given, to an input."""
    if context is None or len(row.values) != 1:
        return row
    return Row(row.place, (f"{row.values[0]}\t{read_text(context).strip()}",))


def pair_predictions(rows: Iterable[Row], predictions: Iterator[Prediction]) -> Iterator[tuple[Row, Prediction | None]]:
    """Pair every input with its prediction, or with None if the input was skipped."""
    prediction = next(predictions, None)
    for row in rows:
        if prediction is not None and row.values and prediction.place == row.place:
            yield row, prediction
            prediction = next(predictions, None)
        else:
            yield row, None
    if prediction is not None:
        raise RuntimeError(f"a prediction has the place {prediction.place!r}, which no input has")


def _exists(given: str) -> bool:
    try:
        return Path(given).exists()
    except (OSError, ValueError):  # too long for a file name, so it is a text
        return False


def _read_stdin(predictor: Predictor, form: str, bad: BadRows) -> Iterator[Row]:
    if form in ("", "txt"):
        texts = ((f"{STREAM}:{n}", decode_line(STREAM, n, line, bad)) for n, line in enumerate(sys.stdin.buffer, 1))
        lines = ((place, text) for place, text in texts if text is not None)
        yield from with_placeholders(_texts(predictor, lines, bad, table_hint="" if form else "use --format "), bad)
        return
    if predictor.input_kind != "text" or "image" in predictor.columns:
        raise UserError(
            "--format: a table of paths is not read from standard input, as the paths are relative to it; give the file"
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, f"{STREAM}.{form}")
        copy.write_bytes(sys.stdin.buffer.read())
        yield from with_placeholders(predictor.read_inputs(str(copy), bad), bad)


def _texts(predictor: Predictor, lines: Iterable[tuple[str, str]], bad: BadRows, *, table_hint: str) -> Iterator[Row]:
    """One text per line; blank lines are rows without values.

    table_hint: start of the advice in the error about a table, whose labels would be read as part of the inputs; empty
        to skip that check.
    """
    first = True
    for place, line in lines:
        text = line.strip()
        if first and text and table_hint and (kind := _table_kind(predictor, text)):
            raise UserError(f"{place}: expected a text, but {text[:60]!r} begins a table; {table_hint}{kind}")
        first = first and not text
        if "\t" in text and table_hint and len(predictor.columns) > 1 and not predictor.splits_at_tabs:
            bad.add(f"{place}: expected a text, but it has a tab, as tables do; {table_hint}tsv if it is one")
        else:
            yield Row(place, (text,) if text else ())


def _table_kind(predictor: Predictor, first: str) -> str:
    """The format of the table that has this first line, or an empty string."""
    names = predictor.column_names()
    if first.startswith("{"):
        try:
            record = json.loads(first)
        except ValueError:
            return ""
        return "jsonl" if any(name.split(".")[0] in record for name in names) else ""
    for kind, delimiter in (("csv", ","), ("tsv", "\t")):
        if len(names) > 1 and set(names) <= set(split_cells(first, delimiter)):
            return kind
    return ""
