"""`regard predict` and `regard export`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from regard.cli.chat import interact
from regard.cli.console import print_bad_rows, print_json, print_line, print_message, print_piece
from regard.cli.inputs import pair_predictions, read_inputs, with_context
from regard.data.readers import Row
from regard.errors import BadRows, UserError
from regard.files import check_writable, write_atomically, write_text_atomically
from regard.predictors import PredictOptions, Predictor, open_model
from regard.printable import printable
from regard.progress import stage
from regard.training.export import export as export_run
from regard.training.runs import Run
from regard.training.task import Prediction


def predict(
    name: str, inputs: list[str] | None, out: Path | None, context: Path | None, file_format: str, skip_bad: bool,
    as_json: bool, options: PredictOptions,
) -> None:  # fmt: skip
    """Print one line of output and score per input, or write `out`; stream the output for one input if possible."""
    predictor = open_model(name)
    predictor.configure(options)
    suffix = _check_out(predictor, out)
    if not inputs and sys.stdin.isatty() and predictor.input_kind == "text" and not suffix:
        interact(predictor, context)
        return
    bad = BadRows(skip=skip_bad)
    with stage("reading inputs"):
        rows = [with_context(row, context) for row in read_inputs(predictor, inputs or [], bad, file_format)]
    if not any(row.values for row in rows):
        raise UserError('nothing to predict; give texts or files: regard predict MODEL "..."')
    if out is not None:
        one = not suffix or (out.suffix == suffix and len(rows) == 1)
        check_writable(out if one else out / f"0001{suffix}", parents=bool(suffix))
    if predictor.streams and out is None and not as_json and len(rows) == 1:
        predictor.stream(rows[0], bad, print_piece)
        print_piece("\n")
        print_bad_rows(bad)
        return
    nonempty = [row for row in rows if row.values]
    predictions = _report_progress(predictor.predict(nonempty, bad), f"predicting {len(nonempty):,} inputs", out)
    if out is not None and not suffix:
        _write_answers(out, predictions)
    else:
        _print_predictions(predictor, rows, predictions, out, suffix, as_json)
    print_bad_rows(bad)


def _check_out(predictor: Predictor, out: Path | None) -> str:
    """Return the suffix of the files to write; empty if outputs are printed, or written as JSON."""
    suffixes = predictor.file_suffixes
    required = predictor.output_kind != "text"
    if required and out is None:
        raise UserError(f"{predictor.name}: writes files; give a path, such as --out speech{suffixes[0]}")
    if out is None or (out.suffix == ".json" and not required):
        return ""
    if out.suffix in suffixes:
        return out.suffix
    if suffixes and not out.suffix:  # a folder
        return suffixes[0]
    allowed = " or ".join([*suffixes, *([] if required else [".json"])])
    raise UserError(
        f"{out}: the outputs of {predictor.name} are written as {allowed}; name the file {out.stem}{allowed.split()[0]}"
    )


def _write_answers(out: Path, predictions: Iterator[Prediction]) -> None:
    """Write the outputs as {id: output}."""
    answers = {prediction.more.get("id", prediction.input): prediction.output for prediction in predictions}
    write_text_atomically(out, json.dumps(answers, indent=1, ensure_ascii=False))
    print_message(f"{out}: {len(answers)} answers")


def _print_predictions(
    predictor: Predictor, rows: Sequence[Row], predictions: Iterator[Prediction], out: Path | None, suffix: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Print a line per row, and write a file per row if there is a suffix."""
    for n, (row, prediction) in enumerate(pair_predictions(rows, predictions), 1):
        if prediction is None:
            given = " ".join(map(str, row.values[:1]))
            if as_json:
                print_json({"input": given, "output": None, "score": None}, indent=None)
            else:
                print_line("")
            continue
        where = prediction.input if predictor.input_kind != "text" else ""
        more = dict(prediction.more)
        if out is not None:
            path = out if out.suffix == suffix and len(rows) == 1 else out / f"{n:04}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = predictor.write_file(prediction, suffix)
            write_atomically(path, partial(Path.write_bytes, data=data))
            where = more["file"] = str(path)
        if as_json:
            record = {"input": prediction.input, "output": prediction.output, "score": prediction.score}
            if taken := sorted(record.keys() & more.keys()):
                raise UserError(
                    f"{predictor.name}: a label is {taken[0]!r}, the name of another value in JSON; omit --json"
                )
            print_json(record | more, indent=None)
        else:
            score = None if prediction.score is None else f"{prediction.score:.3f}"
            cells = (prediction.output, *filter(None, (score, where, prediction.note)))
            print_line("\t".join(map(printable, cells)))  # line n belongs to input n


def _report_progress(predictions: Iterator[Prediction], label: str, out: Path | None) -> Iterator[Prediction]:
    """Yield the predictions within a stage. If they are printed on a terminal, the stage ends with the first one."""
    if out is None and sys.stdout.isatty():
        with stage(label):
            first = next(predictions, None)
        if first is not None:
            yield first
            yield from predictions
    else:
        with stage(label):
            yield from predictions


def export(folder: Path, out: Path, onnx: bool) -> None:
    """Export a run as one folder and print the files written."""
    for note in export_run(Run.open(folder), out, onnx=onnx):
        print_line(f"{out}: {note}")
